"""What is special to the store on S3: addresses, settings, strangers in the bucket."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from adapters.errors import InvalidRequest, PreconditionFailed, StoreUnavailable
from adapters.open_store import open_store
from adapters.s3_calls import S3Limits, make_client
from adapters.s3_store import S3Store
from adapters.s3_url import S3Place, parse_s3_url


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("s3://acme-adapters", S3Place("acme-adapters")),
        ("s3://acme-adapters/", S3Place("acme-adapters")),
        ("s3://acme.adapters/prod/v1/", S3Place("acme.adapters", "prod/v1")),
    ],
)
def test_addresses(url: str, place: S3Place) -> None:
    assert parse_s3_url(url) == place


@pytest.mark.parametrize(
    "url",
    [
        *("s3:/bucket", "s3:bucket", "s3://", "s3:///x", "s3://B/x", "s3://a/x", "s3://bucket:80/x", "s3://bucket?x=1"),
        *(
            "s3://bucket//x",
            "s3://bucket/../x",
            "s3://bucket/.x",
            "s3://bucket/x?y",
            "s3://bucket/x#y",
            "s3://bucket/ä",
        ),
        *("s3://bucket--use1-az1--x-s3/x", "s3://bucket/" + "x" * 300, "s3://bucket/" + "/".join(["x" * 50] * 6)),
    ],
)
def test_malformed_addresses_are_refused(url: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        open_store(url)
    assert refused.value.param == "registry"


def test_a_secret_in_an_address_is_not_repeated() -> None:
    with pytest.raises(InvalidRequest) as refused:
        open_store("s3://AKIAEXAMPLE:wJalrSecret@bucket/x")
    assert "wJalr" not in str(refused.value)
    assert "credentials" in str(refused.value)


def test_a_directory_costs_no_boto3(tmp_path: Path) -> None:
    code = (
        "import sys; from adapters.open_store import *; open_checked_store(sys.argv[1]); print('boto3' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr


def test_what_others_put_into_the_bucket_is_not_listed(new_s3_store: Callable[[], S3Store]) -> None:
    store = new_s3_store()
    store.put("a/b", b"")
    for name in ("", "a/", "a/ b", "a/.hidden", "ä/b", "../x"):
        store.calls.client.put_object(Bucket="garnish-tests", Key=f"{store.place.prefix}/{name}", Body=b"")
    assert [info.key for info in store.list("")] == ["a/b"]
    assert [info.key for info in store.list("", limit=1)] == ["a/b"]
    assert list(store.folders("")) == ["a"]


def test_stores_of_one_bucket_do_not_meet(new_s3_store: Callable[[], S3Store]) -> None:
    one, two = new_s3_store(), new_s3_store()
    two.place = S3Place(one.place.bucket, f"{one.place.prefix}0")
    two.put("key", b"")
    assert (one.list(""), one.folders(""), one.head("key")) == ((), (), None)
    with pytest.raises(InvalidRequest, match="too long"):
        one.put("/".join(["x" * 200] * 5), b"")


def test_an_etag_that_none_can_be(new_s3_store: Callable[[], S3Store]) -> None:
    store = new_s3_store()
    store.put("key", b"1")
    for etag in ("", "*", "a b", 'x"', "x\r\nX-Other: 1", "x" * 300, "ä"):
        with pytest.raises(PreconditionFailed):
            store.put_if_match("key", b"2", etag)
    assert store.get("key").data == b"1"


def test_without_credentials(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    store = open_store("s3://garnish-tests/x")
    with pytest.raises(StoreUnavailable, match="NoCredentialsError"):
        store.head("key")
    monkeypatch.setenv("AWS_PROFILE", "no-such-profile")
    with pytest.raises(StoreUnavailable, match="no-such-profile"):
        open_store("s3://garnish-tests/x")


def test_where_the_bucket_stands_in_an_address(
    s3_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the host's name on Amazon's S3, in the path on other servers, unless the profile says otherwise."""

    def address() -> str:
        client = make_client(S3Limits())
        return str(client.generate_presigned_url("get_object", Params={"Bucket": "bucket", "Key": "key"}))

    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://store.example:9000")
    assert address().startswith("http://store.example:9000/bucket/key?")
    (tmp_path / "config").write_text("[default]\ns3 =\n  addressing_style = virtual\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    assert address().startswith("http://bucket.store.example:9000/key?")
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    assert address().startswith("https://bucket.s3.amazonaws.com/key?")
