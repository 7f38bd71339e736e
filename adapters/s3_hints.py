"""Advice about failures of S3 and of the way to it, for the operator."""

from __future__ import annotations

from botocore import exceptions as aws
from botocore.exceptions import ClientError
from botocore.parsers import ResponseParserError

ACTIONS = {
    "PutObject": "s3:PutObject",
    "CreateMultipartUpload": "s3:PutObject",
    "UploadPart": "s3:PutObject",
    "CompleteMultipartUpload": "s3:PutObject",
    "AbortMultipartUpload": "s3:AbortMultipartUpload",
    "GetObject": "s3:GetObject",
    "HeadObject": "s3:GetObject",
    "DeleteObject": "s3:DeleteObject",
    "DeleteObjects": "s3:DeleteObject",
    "ListObjectsV2": "s3:ListBucket",
}
"""Permissions of calls."""
CODES = {
    "RequestTimeTooSkewed": "set this host's clock",
    "SignatureDoesNotMatch": "check the secret key; a proxy on the way must not change headers",
    "InvalidAccessKeyId": "the store does not know this access key; check AWS_PROFILE or AWS_ACCESS_KEY_ID",
    "ExpiredToken": "the credentials have expired; get new ones",
    "InvalidToken": "the session token is wrong; check AWS_SESSION_TOKEN",
    "NoSuchBucket": "make the bucket, or check its name and AWS_ENDPOINT_URL_S3",
    "SecondLevelDomainForbidden": "set s3.addressing_style = virtual in the AWS profile",
    "InvalidBucketName": "the store may want the bucket in the path: set s3.addressing_style = path in the AWS profile",
}
"""Advice by the code of an answer."""
REGION_CODES = ("AuthorizationHeaderMalformed", "PermanentRedirect", "IllegalLocationConstraintException")
FORBIDDEN = ("AccessDenied", "403", "Forbidden")


def advice(error: Exception) -> str:
    """Returns what to do about a failed call, after "; "; empty if that is not known."""
    text = _of_answer(error) if isinstance(error, ClientError) else _of_way(error)
    return f"; {text}" if text else ""


def _of_answer(error: ClientError) -> str:
    details = error.response.get("Error", {})
    code = str(details.get("Code", ""))
    headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    region = details.get("Region") or headers.get("x-amz-bucket-region")
    if code in REGION_CODES or (code == "301" and region):
        in_words = f" ({str(region)[:60]})" if region else ""
        return f"set AWS_REGION to the bucket's region{in_words}"
    if code in FORBIDDEN:
        action = ACTIONS.get(error.operation_name)
        return f"allow {action} to these credentials" if action else ""
    return CODES.get(code, "")


def _of_way(error: Exception) -> str:
    match error:
        case aws.ProxyConnectionError():
            return "HTTPS_PROXY or HTTP_PROXY names a proxy that does not answer; NO_PROXY leaves hosts out"
        case aws.SSLError():
            return "the store's certificate is not trusted; name its authority's file in AWS_CA_BUNDLE"
        case aws.NoCredentialsError() | aws.PartialCredentialsError():
            return "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        case aws.NoRegionError():
            return "set AWS_REGION to the bucket's region"
        case aws.EndpointConnectionError() | aws.ConnectTimeoutError():
            return (
                "check AWS_ENDPOINT_URL_S3; if only the bucket's own host name is unknown, set "
                "s3.addressing_style = path in the AWS profile"
            )
        case ResponseParserError():
            return "something else than S3 answers: check AWS_ENDPOINT_URL_S3 and HTTPS_PROXY"
    return ""
