"""Address of a registry on S3: `s3://bucket` or `s3://bucket/prefix`. Does not import boto3."""

from __future__ import annotations

import re

import msgspec

from adapters.errors import InvalidRequest
from adapters.store import is_key

MAX_PREFIX = 256
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", re.ASCII)
_URL = re.compile(r"s3://([^/?#]*)/?(.*)", re.DOTALL)


class S3Place(msgspec.Struct, frozen=True):
    """A bucket, or a prefix in it."""

    bucket: str
    prefix: str = ""
    """Key prefix without leading or trailing slash; empty: the whole bucket."""


def parse_s3_url(url: str) -> S3Place:
    """Returns the bucket and the prefix of the address. Raises InvalidRequest, which says what is wrong with it."""
    match = _URL.fullmatch(url)
    if match is None:
        raise InvalidRequest("registry", f"{url[:200]!r} is not of the form s3://bucket/prefix")
    bucket, prefix = match[1], match[2].rstrip("/")
    if "@" in bucket:  # not shown, since it may contain a secret
        raise InvalidRequest(
            "registry", "an s3:// address holds no credentials; they come from a profile or the environment"
        )
    if not _BUCKET.fullmatch(bucket):
        raise InvalidRequest("registry", f"{bucket[:200]!r} in {url[:200]!r} is not the name of an S3 bucket")
    if bucket.endswith("--x-s3"):
        raise InvalidRequest("registry", f"{bucket} is a directory bucket, which does not list keys in order")
    if prefix and (len(prefix) > MAX_PREFIX or not is_key(prefix)):
        raise InvalidRequest(
            "registry",
            f"the prefix {prefix[:200]!r} is not made of segments of letters, digits, '.', '_', '-' (no '.' in front) "
            f"or has more than {MAX_PREFIX} bytes",
        )
    return S3Place(bucket, prefix)
