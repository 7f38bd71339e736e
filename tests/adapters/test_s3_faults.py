"""The store on S3 when network and server fail: what passes is tried again, and what was written is known or said not
to be."""

from __future__ import annotations

import copy
import hashlib
import os
import socket
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from adapters import s3_calls
from adapters.errors import (
    AdapterError,
    Conflict,
    InvalidRequest,
    NotFound,
    PreconditionFailed,
    StoreFull,
    StoreUnavailable,
)
from adapters.open_store import open_checked_store
from adapters.s3_calls import S3Limits
from adapters.s3_probe import check_conditions
from adapters.s3_store import S3Store
from adapters.s3_url import S3Place
from gateway.http.errors import to_service_error
from tests.support.ports import free_port
from tests.support.s3_proxy import Fault, Proxy

LIMITS = S3Limits(connect=60.0, read=60.0, call=300.0, attempts=4, part=5 << 20)
"""No healthy answer is late for these, however busy the machine is."""
HURRIED = msgspec.structs.replace(LIMITS, read=0.5, attempts=8)
"""For an answer that does not come; one that comes later than usual is asked for again."""
ALWAYS = 1000


class Clients(NamedTuple):
    proxy: Proxy
    patient: S3Store
    """Behind the proxy."""
    hurried: S3Store
    """Behind the proxy."""
    direct: S3Store


@pytest.fixture(scope="module")
def clients(s3_endpoint: str, new_s3_store: Callable[[], S3Store]) -> Iterator[Clients]:
    """The second attempt of a call is made at once."""
    place = S3Place("garnish-tests")
    with Proxy(s3_endpoint) as proxy, pytest.MonkeyPatch.context() as patch:
        patch.setattr(s3_calls, "FIRST_PAUSE_S", 0.001)
        patch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
        yield Clients(proxy, S3Store(place, LIMITS), S3Store(place, HURRIED), new_s3_store())


@pytest.fixture
def place() -> S3Place:
    return S3Place("garnish-tests", uuid.uuid4().hex)


@pytest.fixture
def proxy(clients: Clients) -> Proxy:
    proxy = clients.proxy
    proxy.faults, proxy.requests = [], []
    return proxy


@pytest.fixture
def store(clients: Clients, place: S3Place) -> S3Store:
    return at(clients.patient, place)


@pytest.fixture
def hurried(clients: Clients, place: S3Place) -> S3Store:
    return at(clients.hurried, place)


@pytest.fixture
def direct(clients: Clients, place: S3Place) -> S3Store:
    """The same objects, without the proxy."""
    return at(clients.direct, place)


def at(store: S3Store, place: S3Place) -> S3Store:
    """The same client at another place: to make one takes longer than most tests."""
    other = copy.copy(store)
    other.place = place
    return other


def limited(store: S3Store, **limits: float) -> S3Store:
    """The same client with other limits of the store's own; those of a connection stay."""
    other = copy.copy(store)
    other.calls = copy.copy(store.calls)
    other.calls.limits = msgspec.structs.replace(store.calls.limits, **limits)
    return other


def uploads(store: S3Store) -> list[str]:
    """Uploads that were begun and not ended."""
    found = store.calls.client.list_multipart_uploads(Bucket=store.place.bucket, Prefix=store.place.prefix)
    return [upload["Key"] for upload in found.get("Uploads", ())]


ETAG_OF_1 = hashlib.md5(b"1").hexdigest()
CALLS: dict[str, Callable[[S3Store], object]] = {
    "get": lambda store: store.get("key"),
    "head": lambda store: store.head("key"),
    "get_range": lambda store: store.get_range("key", 0, 9),
    "list": lambda store: store.list(""),
    "folders": lambda store: store.folders(""),
    "put": lambda store: store.put("key", b"2"),
    "put_if_absent": lambda store: store.put_if_absent("new", b"2"),
    "put_if_match": lambda store: store.put_if_match("key", b"2", ETAG_OF_1),
    "delete": lambda store: store.delete("key"),
}

PASSING = [
    Fault("reset", times=2),
    Fault("lose", times=2),
    Fault("refuse", times=2),
    Fault("blind", times=2),
    Fault("blind", times=1, status=503, code="elsewhere"),
    Fault("refuse", times=3, status=503, code="SlowDown"),
    Fault("refuse", times=3, status=429, code="TooManyRequests"),
    Fault("refuse", "PUT", times=2, status=409, code="ConditionalRequestConflict"),
    Fault("refuse", "PUT", times=2, status=400, code="RequestTimeout"),
    Fault("stall", "PUT", times=1),
    Fault("stall", "GET", times=1),
]


@pytest.mark.parametrize("fault", PASSING, ids=lambda fault: f"{fault.kind}-{fault.status}")
def test_what_passes_is_tried_again(
    proxy: Proxy, store: S3Store, hurried: S3Store, direct: S3Store, fault: Fault
) -> None:
    """The outcome is that of a call without fault, and happened once."""
    store = hurried if fault.kind == "stall" else store
    for name, call in CALLS.items():
        if not name.startswith(fault.match.lower()):
            continue
        direct.put("key", b"1")
        proxy.faults = [replace(fault)]
        outcome = call(store)
        assert proxy.faults[0].times == 0, "the fault has happened"
        if name == "delete":
            assert direct.head("key") is None
        elif name.startswith("put"):
            written = direct.get("new" if name == "put_if_absent" else "key")
            assert (written.data, written.etag) == (b"2", outcome), name
        else:
            assert direct.get("key").data == b"1"
            assert outcome == call(direct), name


LASTING = [
    Fault("reset", times=ALWAYS),
    Fault("stall", "GET", times=ALWAYS),
    Fault("refuse", times=ALWAYS),
    Fault("refuse", times=ALWAYS, status=503, code="SlowDown"),
    Fault("refuse", "PUT", times=ALWAYS, status=409, code="ConditionalRequestConflict"),
]


@pytest.mark.parametrize("fault", LASTING, ids=lambda fault: f"{fault.kind}-{fault.status}")
def test_what_lasts_ends_after_a_few_attempts(proxy: Proxy, store: S3Store, hurried: S3Store, fault: Fault) -> None:
    store = limited(hurried, attempts=2) if fault.kind == "stall" else store
    for name, call in CALLS.items():
        proxy.faults = [replace(fault)]
        if not name.startswith(fault.match.lower()):
            continue
        proxy.requests.clear()
        with pytest.raises(StoreUnavailable, match="gave no valid answer"):
            call(store)
        assert 1 <= len(proxy.requests) <= store.calls.limits.attempts, name


@pytest.mark.parametrize(
    ("status", "code"), [(403, "AccessDenied"), (405, "MethodNotAllowed"), (501, "NotImplemented")]
)
def test_what_will_not_change_is_not_tried_again(proxy: Proxy, store: S3Store, status: int, code: str) -> None:
    proxy.faults = [Fault("refuse", "", ALWAYS, status, code)]
    for name, call in CALLS.items():
        proxy.requests.clear()
        with pytest.raises(StoreUnavailable, match=str(status)) as raised:
            call(store)
        without_checksum = status == 501 and name.startswith("put")  # which may have been the reason
        assert len(proxy.requests) == 1 + without_checksum, name
        assert "testing-secret" not in str(raised.value)


def test_nobody_listens(s3_endpoint: str, place: S3Place, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{listener.getsockname()[1]}")
    store = S3Store(place, LIMITS)
    for call in CALLS.values():
        with pytest.raises(StoreUnavailable, match="EndpointConnectionError"):
            call(store)


@pytest.mark.parametrize("fault", [Fault("lose", "PUT"), Fault("blind", "PUT", status=502, code="BadGateway")])
def test_a_conditional_write_whose_reply_is_lost_has_succeeded(
    proxy: Proxy, store: S3Store, direct: S3Store, fault: Fault
) -> None:
    """The second attempt finds the condition unmet, by the first one's own doing."""
    proxy.faults = [replace(fault)]
    etag = store.put_if_absent("key", b"1")
    assert [line.split()[0] for line in proxy.requests] == ["PUT", "PUT", "HEAD"]
    assert direct.get("key").etag == etag
    proxy.faults = [replace(fault, times=3)]
    etag = store.put_if_match("key", b"2", etag)
    assert (direct.get("key").data, direct.get("key").etag) == (b"2", etag)


def test_a_lost_reply_and_another_write_since_are_told_apart_from_a_refusal(
    proxy: Proxy, store: S3Store, direct: S3Store
) -> None:
    """Ours was there, and someone who had read it wrote next: neither success nor refusal would be true."""
    etag = direct.put("key", b"1")

    def other() -> None:
        direct.put_if_match("key", b"3", direct.get("key").etag)

    proxy.faults = [Fault("lose", "PUT", meanwhile=other)]
    with pytest.raises(StoreUnavailable, match="unknown whether"):
        store.put_if_match("key", b"2", etag)
    proxy.faults = [Fault("lose", "PUT", meanwhile=lambda: direct.put("new", b"3"))]
    with pytest.raises(StoreUnavailable, match="unknown whether"):
        store.put_if_absent("new", b"2")
    proxy.faults = [Fault("refuse", "PUT", status=503, code="SlowDown", meanwhile=None)]
    with pytest.raises(PreconditionFailed):  # the first attempt did nothing for sure
        store.put_if_match("key", b"2", etag)
    proxy.faults = [Fault("refuse", "PUT", status=409, code="ConditionalRequestConflict")]
    with pytest.raises(Conflict):
        store.put_if_absent("new", b"2")
    assert (direct.get("key").data, direct.get("new").data) == (b"3", b"3")


@pytest.mark.parametrize("short", [1, 500, 1000])
def test_a_body_that_ends_early_is_read_again(proxy: Proxy, store: S3Store, direct: S3Store, short: int) -> None:
    data = os.urandom(1000)
    direct.put("key", data)
    for call in (
        lambda: store.get("key").data,
        lambda: store.get_range("key", 0, 1000),
        lambda: store.get_range("key", 10, 2000)[:990],
    ):
        proxy.faults = [Fault("cut", "GET", times=2, bytes_short=min(short, 990))]
        assert call() in (data, data[10:])
        assert proxy.faults[0].times == 0
    proxy.faults = [Fault("cut", "GET", times=ALWAYS, bytes_short=min(short, 990))]
    with pytest.raises(StoreUnavailable, match="gave no valid answer"):
        store.get_range("key", 10, 990)


def test_a_body_that_drips_is_given_up(proxy: Proxy, store: S3Store, direct: S3Store) -> None:
    """Once the call's time is over, and then no attempt follows."""
    direct.put("key", bytes(100_000))
    proxy.faults = [Fault("drip", "GET", times=ALWAYS)]
    short = limited(store, call=0.3)
    for call in (lambda: short.get("key"), lambda: short.get_range("key", 0, 100_000)):
        proxy.requests.clear()
        with pytest.raises(StoreUnavailable, match="arrived in time"):
            call()
        assert len(proxy.requests) == 1


def test_a_server_that_ignores_ranges_is_noticed(proxy: Proxy, store: S3Store, direct: S3Store) -> None:
    direct.put("key", bytes(100))
    proxy.faults = [Fault("whole", "GET", times=2)]
    assert store.get_range("key", 5, 10) == bytes(10)
    proxy.faults = [Fault("whole", "GET", times=ALWAYS)]
    with pytest.raises(StoreUnavailable, match="has no range"):
        store.get_range("key", 5, 10)


def test_a_bucket_that_is_gone_is_no_empty_store(direct: S3Store) -> None:
    store = at(direct, S3Place("garnish-no-such-bucket", "x"))
    for call in CALLS.values():
        with pytest.raises(StoreUnavailable):
            call(store)


def test_a_large_object_survives_faults_in_every_step(
    proxy: Proxy, store: S3Store, direct: S3Store, tmp_path: Path
) -> None:
    data, file = os.urandom((12 << 20) + 5), tmp_path / "file"
    file.write_bytes(data)
    proxy.faults = [
        Fault("refuse", "?uploads", status=503, code="SlowDown"),
        Fault("reset", "partNumber=1"),
        Fault("lose", "partNumber=2"),
        Fault("refuse", "partNumber=3"),
        Fault("lose", "POST /garnish-tests/" + store.place.prefix + "/big?uploadId"),
    ]
    etag = store.put_if_absent("big", file)
    assert [fault.times for fault in proxy.faults] == [0] * 5
    assert direct.get("big").data == data
    assert direct.get("big").etag == etag
    assert uploads(direct) == []
    piece = f"GET /garnish-tests/{store.place.prefix}/big"
    proxy.faults = [Fault("reset", piece), Fault("cut", piece), Fault("refuse", piece)]  # a piece has 4 attempts
    memory = bytearray(len(data))
    assert store.get_range_into("big", 1, memoryview(memory)) == len(data) - 1
    assert memory[:-1] == data[1:]
    assert [fault.times for fault in proxy.faults] == [0] * 3


@pytest.mark.parametrize(
    ("fault", "raised"),
    [
        (Fault("refuse", "partNumber=2", ALWAYS), StoreUnavailable),
        (Fault("refuse", "partNumber=2", ALWAYS, 403, "AccessDenied"), StoreUnavailable),
        (Fault("refuse", "POST /garnish-tests/{}/big?uploadId", ALWAYS), StoreUnavailable),
        (Fault("refuse", "POST /garnish-tests/{}/big?uploadId", ALWAYS, 409, "OperationAborted"), StoreUnavailable),
        (Fault("refuse", "POST /garnish-tests/{}/big?uploadId", 1, 412, "PreconditionFailed"), Conflict),
    ],
)  # fmt: skip
def test_an_upload_that_fails_leaves_no_parts(
    proxy: Proxy, store: S3Store, direct: S3Store, fault: Fault, raised: type[AdapterError]
) -> None:
    match = fault.match.format(store.place.prefix)
    proxy.faults = [Fault(fault.kind, match, fault.times, fault.status, fault.code)]
    with pytest.raises(raised):
        store.put_if_absent("big", bytes(12 << 20))
    assert uploads(direct) == []
    assert direct.head("big") is None


def test_a_conflict_at_the_end_of_an_upload_begins_it_anew(proxy: Proxy, store: S3Store, direct: S3Store) -> None:
    match = f"POST /garnish-tests/{store.place.prefix}/big?uploadId"
    proxy.faults = [Fault("refuse", match, 2, 409, "ConditionalRequestConflict")]
    store.put_if_absent("big", bytes(6 << 20))
    assert sum("?uploads" in line for line in proxy.requests) == 3
    assert direct.get("big").data == bytes(6 << 20)
    assert uploads(direct) == []


def test_who_comes_second_with_a_large_object_is_refused(proxy: Proxy, store: S3Store, direct: S3Store) -> None:
    """Also when the first one comes after the upload has begun: the condition holds at its end."""
    proxy.faults = [Fault("none", "partNumber=1", meanwhile=lambda: direct.put("big", b"first"))]
    with pytest.raises(Conflict):
        store.put_if_absent("big", bytes(6 << 20))
    assert direct.get("big").data == b"first"
    assert uploads(direct) == []
    proxy.requests.clear()
    with pytest.raises(Conflict):
        store.put_if_absent("big", bytes(6 << 20))
    assert [line.split()[0] for line in proxy.requests] == ["HEAD"], "nothing is sent in vain"


def test_a_large_range_is_of_one_content(proxy: Proxy, store: S3Store, direct: S3Store) -> None:
    """Written anew between two pieces, it is read again; written anew each time, it is given up."""
    size, reader = 250_000, limited(store, part=100_000)
    direct.put("big", b"1" * size)
    match = f"GET /garnish-tests/{store.place.prefix}/big"
    proxy.faults = [Fault("none", match, meanwhile=lambda: direct.put("big", b"2" * size))]
    assert reader.get_range("big", 0, size) == b"2" * size
    assert proxy.faults[0].times == 0
    assert len(proxy.requests) >= 1 + 3, "in pieces"
    proxy.faults = [Fault("none", match, ALWAYS, meanwhile=lambda: direct.put("big", os.urandom(size)))]
    with pytest.raises(StoreUnavailable, match="rewritten too often"):
        reader.get_range("big", 0, size)
    proxy.faults = [Fault("none", match, meanwhile=lambda: direct.delete("big"))]
    with pytest.raises(NotFound):
        reader.get_range("big", 0, size)


@pytest.mark.parametrize(
    ("ignored", "told"),
    [(("if-none-match",), "ignores If-None-Match"), (("if-match",), "ignores If-Match"), ((), None)],
)
def test_a_store_that_ignores_conditions_is_refused_at_start(
    s3_endpoint: str,
    place: S3Place,
    direct: S3Store,
    monkeypatch: pytest.MonkeyPatch,
    ignored: tuple[str, ...],
    told: str | None,
) -> None:
    with Proxy(s3_endpoint, ignored) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
        url = f"s3://{place.bucket}/{place.prefix}"
        if told is None:
            assert isinstance(open_checked_store(url), S3Store)
        else:
            with pytest.raises(InvalidRequest, match=told):
                open_checked_store(url)
    assert direct.list("") == ()
    assert uploads(direct) == []


@pytest.mark.parametrize(
    ("status", "code"),
    [(507, "XMinioStorageFull"), (507, "anything"), (403, "QuotaExceeded"), (503, "InsufficientStorage")],
)
def test_a_bucket_without_room_is_full(
    proxy: Proxy, store: S3Store, direct: S3Store, tmp_path: Path, status: int, code: str
) -> None:
    """It is asked once, and callers are answered 507."""
    large = tmp_path / "large"
    large.write_bytes(bytes(2 * LIMITS.part))
    writes = [("put", b"2"), ("put_if_absent", b"2"), ("put", large), ("put_if_absent", large)]
    for name, content in writes:
        proxy.faults, proxy.requests = [Fault("refuse", match, ALWAYS, status, code) for match in ("PUT", "POST")], []
        with pytest.raises(StoreFull) as raised:
            getattr(store, name)("new", content)
        assert len([request for request in proxy.requests if request.startswith(("PUT", "POST"))]) == 1
        answer = to_service_error(raised.value)
        assert (answer.type, answer.status) == ("insufficient_storage", 507)
        proxy.faults = []
        assert not direct.list("")
    assert not uploads(direct)


def test_a_store_that_refuses_checksums_gets_none(
    s3_endpoint: str, place: S3Place, direct: S3Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The probe tries without, says so, and later writes have none, either: whole ones and those in parts."""
    with Proxy(s3_endpoint, unknown=("x-amz-checksum-", "x-amz-sdk-checksum", "x-amz-trailer")) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
        store = open_checked_store(f"s3://{place.bucket}/{place.prefix}")
        assert isinstance(store, S3Store)
        assert [record.message for record in caplog.records if "checksums" in record.message] == [
            "the S3 store refuses checksums in requests, and gets none"
        ]
        proxy.requests.clear()
        store.put("small", b"1")
        assert len(proxy.requests) == 1, "nothing is tried twice any more"
        store.put_if_absent("large", bytes(9 << 20))
    assert direct.get("small").data == b"1"
    assert direct.get("large").data == bytes(9 << 20)


@pytest.mark.parametrize(
    ("fault", "advice"),
    [
        (Fault("refuse", "PUT", ALWAYS, 403, "AccessDenied"), "PutObject was answered 403.*allow s3:PutObject"),
        (Fault("refuse", "GET", ALWAYS, 403, "AccessDenied"), "GetObject was answered 403.*allow s3:GetObject"),
        (Fault("refuse", "DELETE", ALWAYS, 403, "AccessDenied"), "allow s3:DeleteObject"),
        (Fault("refuse", "uploads", ALWAYS, 403, "AccessDenied"), "CreateMultipartUpload.*allow s3:PutObject"),
        (Fault("refuse", "", ALWAYS, 400, "AuthorizationHeaderMalformed"), "set AWS_REGION to the bucket's region"),
        (Fault("refuse", "", ALWAYS, 403, "RequestTimeTooSkewed"), "set this host's clock"),
        (Fault("refuse", "", ALWAYS, 403, "SignatureDoesNotMatch"), "check the secret key"),
        (Fault("refuse", "", ALWAYS, 403, "InvalidAccessKeyId"), "does not know this access key"),
        (Fault("refuse", "", ALWAYS, 403, "SecondLevelDomainForbidden"), "addressing_style = virtual"),
        (Fault("refuse", "", ALWAYS, 404, "NoSuchBucket"), "make the bucket"),
    ],
    ids=lambda value: value.code if isinstance(value, Fault) else "",
)
def test_each_cause_of_a_failed_probe_has_its_line(proxy: Proxy, store: S3Store, fault: Fault, advice: str) -> None:
    proxy.faults = [fault]
    with pytest.raises(StoreUnavailable, match=advice) as failed:
        check_conditions(store)
    assert "\n" not in str(failed.value)
    assert store.calls._has_checksums, "they were not the reason"


def test_causes_on_the_way_to_the_store_have_their_lines(
    s3_endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def failure(**environment: str) -> str:
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            store = S3Store(S3Place("garnish-tests"), S3Limits(connect=2.0, read=2.0, call=2.0, attempts=1))
            with pytest.raises(StoreUnavailable) as failed:
                check_conditions(store)
            return str(failed.value)

    nobody = f"http://127.0.0.1:{free_port()}"
    assert "check AWS_ENDPOINT_URL_S3" in failure(AWS_ENDPOINT_URL_S3=nobody)
    assert "HTTP_PROXY names a proxy that does not answer" in failure(
        AWS_ENDPOINT_URL_S3="http://store.invalid", HTTP_PROXY=nobody
    )
