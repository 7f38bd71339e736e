"""Calls to S3 with retries that are bounded in number and in time.

botocore's own retries are off for two reasons. They have no deadline. They also hide whether an earlier attempt may
have taken effect, which decides what a refused condition means: a 412 after a lost reply can be this process's own
success.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Collection
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar
from urllib.parse import urlsplit

import boto3
import botocore.session
import msgspec
import urllib3
from botocore import exceptions as aws
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

from adapters.errors import StoreFull, StoreUnavailable
from adapters.s3_hints import advice
from adapters.store import Arrived

T = TypeVar("T")

CONNECTIONS = 32
"""Maximum number of pooled connections: a gateway's reading threads (16), the transfers (8), and some to spare."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 2.0
READ_BYTES = 256 << 10
ANSWERS = (404, 412, 416)
"""HTTP statuses that are about the object, and are left to the caller."""
CONFLICTS = ("ConditionalRequestConflict", "OperationAborted")
FULL = ("XMinioStorageFull", "QuotaExceeded", "InsufficientStorage")
"""Error codes of servers without room; Amazon's has none."""
NOT_DONE = ("SlowDown", "ServiceUnavailable", "RequestTimeout", *CONFLICTS)
"""Error codes of requests that S3 did not perform, and that may succeed later."""
WRITES = ("PutObject", "CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload")
"""Calls that have checksums in headers and trailers. Some S3-compatible servers refuse those that they don't know."""
REFUSES_HEADERS = (400, 411, 501)
"""HTTP statuses with which servers refuse such headers; so is 403 for a signature that does not match."""

log = logging.getLogger(__name__)


class S3Limits(msgspec.Struct, frozen=True):
    """Limits of calls to S3, in seconds and bytes. A call ends within `call` + `connect` + `read` seconds, plus one
    second per `slowest` bytes.

    It takes longer only if the host has several addresses and none answers, or if a server sends its headers byte by
    byte.
    """

    connect: float = 3.0
    read: float = 10.0
    """Maximum seconds without received data inside one attempt."""
    call: float = 20.0
    """Seconds after the start of the first attempt in which further attempts may start."""
    slowest: int = 1 << 20
    """Minimum rate of a transfer, in bytes per second; the deadline is extended accordingly."""
    attempts: int = 8
    part: int = 8 << 20
    """Size of a part or piece in bytes (S3: at least 5 MiB). Larger objects are written in parts, and larger ranges
    read in pieces."""


class Refused(Exception):
    """S3 answered with a status that the caller handles."""

    def __init__(self, status: int, code: str, *, doubt: bool) -> None:
        super().__init__(f"{status} {code}")
        self.status, self.code = status, code
        self.doubt = doubt
        """True: an earlier attempt of the same call may have taken effect."""


class Interrupted(Exception):
    """An incomplete answer: shorter than announced, or of another range than requested."""


MAY_PASS = (aws.HTTPClientError, aws.ConnectionError)
"""Errors of botocore that may be temporary; the others (for instance missing credentials) are permanent."""
FAILURES = (BotoCoreError, ClientError, ResponseParserError, urllib3.exceptions.HTTPError, Interrupted)


class S3Calls:
    """Client of one bucket. Methods may be called from any thread."""

    def __init__(self, bucket: str, limits: S3Limits) -> None:
        """Creates a client. Raises StoreUnavailable when boto3's configuration is unusable (for instance an unknown
        profile)."""
        self.bucket, self.limits = bucket, limits
        try:
            self.client = make_client(limits)
        except (BotoCoreError, ValueError) as error:
            raise StoreUnavailable(f"no S3 client can be made ({type(error).__name__}): {error}") from error
        self._has_checksums = True
        """False: the server has refused checksums, and writes without them."""
        self._server_clock: tuple[float, float] | None = None
        """Last Unix time that the server reported, and `time.monotonic()` at that moment."""
        self._record_times(self.client)

    def _record_times(self, client: Any) -> None:
        client.meta.events.register("after-call.s3", self._record_time)

    def server_time(self) -> float:
        """Returns the Unix time by the server's clock, from the Date header of its answers. Without that header,
        returns this host's time."""
        if self._server_clock is None:
            # Not a HEAD request: its answer has no body, and so no reason for a failure.
            self.run(lambda client: client.list_objects_v2(Bucket=self.bucket, MaxKeys=1), self.deadline(), answers=())
        reported, since = self._server_clock or (time.time(), time.monotonic())
        return reported + time.monotonic() - since

    def _record_time(self, http_response: Any, **_: Any) -> None:
        date = _unix_time(http_response.headers.get("date", ""))
        if http_response.status_code < 300 and date is not None:
            self._server_clock = (date, time.monotonic())

    def deadline(self, size: int = 0) -> float:
        """Returns the deadline (`time.monotonic()`) of a call that starts now and transfers `size` bytes."""
        return time.monotonic() + self.limits.call + size / self.limits.slowest

    def run(self, work: Callable[[Any], T], deadline: float, answers: Collection[int] = ANSWERS) -> T:
        """Returns the result of `work(client)`; retries while it fails temporarily and the deadline allows.

        Raises Refused for a status in `answers`, and StoreUnavailable for every other permanent failure.
        """
        doubt = False
        for attempt in range(1, self.limits.attempts + 1):
            try:
                return work(self.client)
            except FAILURES as error:
                if self._has_checksums and _may_refuse_checksums(error):
                    return self._run_without_checksums(work, deadline, answers)
                doubt = self._judge(error, answers, doubt)
                pause = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** (attempt - 1)) * random.uniform(0.5, 1)
                if attempt == self.limits.attempts or time.monotonic() + pause > deadline:
                    raise StoreUnavailable(
                        f"bucket {self.bucket} gave no valid answer in {attempt} attempts; "
                        f"the last one: {describe(error)}{advice(error)}"
                    ) from error
            time.sleep(pause)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _run_without_checksums(self, work: Callable[[Any], T], deadline: float, answers: Collection[int]) -> T:
        """Does what `run` does, without checksums in the requests. If the server takes that, later calls have none,
        either; otherwise they keep them."""
        with_checksums, self._has_checksums = self.client, False
        self.client = make_client(self.limits, checksums="when_required")
        self._record_times(self.client)
        try:
            result = self.run(work, deadline, answers)
        except StoreUnavailable:
            self.client, self._has_checksums = with_checksums, True
            raise
        except Refused:  # by the condition of a write, which the server has read
            self._log_without_checksums()
            raise
        self._log_without_checksums()
        return result

    def _log_without_checksums(self) -> None:
        log.warning("the S3 store refuses checksums in requests, and gets none", extra={"bucket": self.bucket})

    def _judge(self, error: Exception, answers: Collection[int], doubt: bool) -> bool:
        """Returns whether this or an earlier attempt of the call may have taken effect. Raises Refused or
        StoreUnavailable when the call may not be retried."""
        if isinstance(error, ClientError):
            status, code = status_and_code(error)
            if status in answers and code != "NoSuchBucket":
                raise Refused(status, code, doubt=doubt) from error
            if code in NOT_DONE or status == 429:
                return doubt
            if status == 507 or code in FULL:
                raise StoreFull(f"bucket {self.bucket} has no room: {describe(error)}") from error
            if status < 500 or status == 501:
                why = f"{describe(error)}{advice(error)}"
                raise StoreUnavailable(f"bucket {self.bucket} refuses the request: {why}") from error
            return True
        if isinstance(error, (aws.EndpointConnectionError, aws.ConnectTimeoutError)):
            return doubt  # nothing was sent
        if isinstance(error, BotoCoreError) and not isinstance(error, MAY_PASS):
            raise StoreUnavailable(f"bucket {self.bucket} can't be used: {describe(error)}{advice(error)}") from error
        return True


def _may_refuse_checksums(error: Exception) -> bool:
    """Returns whether the server may have refused a write for its checksum."""
    if not isinstance(error, ClientError) or error.operation_name not in WRITES:
        return False
    status, code = status_and_code(error)
    return (status in REFUSES_HEADERS and code not in NOT_DONE) or code == "SignatureDoesNotMatch"


def make_client(limits: S3Limits, checksums: str | None = None) -> Any:
    """Returns an S3 client, configured by boto3's chain of credentials, profile, region and endpoint
    (AWS_ENDPOINT_URL_S3). `checksums`: when requests have them, in botocore's words; None: as configured."""
    settings = botocore.session.get_session()
    session = boto3.session.Session(botocore_session=settings)
    options: dict[str, Any] = {
        "connect_timeout": limits.connect,
        "read_timeout": limits.read,
        "retries": {"total_max_attempts": 1, "mode": "standard"},
        "max_pool_connections": CONNECTIONS,
        "tcp_keepalive": True,
        # Bodies are read as they arrive, and those that matter have a separate SHA-256.
        "response_checksum_validation": "when_required",
    }
    if checksums is not None:
        options["request_checksum_calculation"] = checksums
    client = session.client("s3", config=Config(**options))
    chosen = (settings.get_scoped_config().get("s3") or {}).get("addressing_style")
    if chosen is None and not _is_aws(client.meta.endpoint_url):
        # Few other servers have a host name for each bucket.
        client = session.client("s3", config=Config(**options, s3={"addressing_style": "path"}))
    return client


def _is_aws(endpoint: str) -> bool:
    host = urlsplit(endpoint).hostname or ""
    return host.endswith((".amazonaws.com", ".amazonaws.com.cn"))


def _unix_time(date: str) -> float | None:
    """Returns the Unix time of a Date header; None if it is not a date."""
    try:
        return parsedate_to_datetime(date).timestamp()
    except ValueError:
        return None


def status_and_code(error: ClientError) -> tuple[int, str]:
    """Returns the HTTP status and the S3 error code of a failed call; 0 and "" if it has none."""
    response = error.response
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return int(status), str(response.get("Error", {}).get("Code", ""))


def describe(error: Exception) -> str:
    """Returns a description of the failure without addresses and request data, which stay in the cause."""
    if isinstance(error, ClientError):
        status, code = status_and_code(error)
        return f"{error.operation_name} was answered {status} {code[:100]}"
    return str(error) if isinstance(error, Interrupted) else type(error).__name__


def read_body(reply: Any, target: memoryview, deadline: float, arrived: Arrived | None = None) -> None:
    """Fills `target` with the complete body. Raises Interrupted when the body has another length or is too slow.

    Each read takes what one receive returns, so a slow body can exceed the deadline by at most one read timeout.
    `arrived` is called after each read with the number of bytes in `target`.
    """
    filled = 0
    with reply["Body"] as raw:  # a fully read body has already returned its connection to the pool
        if reply["ContentLength"] != len(target):
            raise Interrupted(f"{reply['ContentLength']} bytes arrived instead of {len(target)}")
        while filled < len(target):
            data = raw.read1(min(READ_BYTES, len(target) - filled))
            if not data:
                raise Interrupted(f"the body ended after {filled} of {len(target)} bytes")
            target[filled : filled + len(data)] = data
            filled += len(data)
            if arrived is not None:
                arrived(filled)
            if filled < len(target) and time.monotonic() > deadline:
                raise Interrupted(f"{filled} of {len(target)} bytes arrived in time")
