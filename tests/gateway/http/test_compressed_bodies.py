"""Bodies with a content encoding: gzip within the limits of plain bodies, everything else refused with what is
accepted."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import httpx
import pytest
from running_gateway import Running

BODY = json.dumps({"prompt": "Once", "max_tokens": 1}).encode()
PATH = "/invoke/stories260K"


def post(gateway: Running, content: bytes, encoding: str = "gzip", path: str = PATH) -> httpx.Response:
    headers = {"content-type": "application/json", "content-encoding": encoding}
    return gateway.client().post(path, content=content, headers=headers)


@pytest.mark.parametrize("encoding", ["gzip", "x-gzip", "GZIP"])
def test_gzip_is_inflated(shared_gateway: Running, encoding: str) -> None:
    assert post(shared_gateway, gzip.compress(BODY), encoding).json()["output"]["text"] == " t0"
    assert post(shared_gateway, BODY, "identity").status_code == 200


def test_a_body_may_hold_no_more_than_a_plain_one(shared_gateway: Running) -> None:
    limit = shared_gateway.config.call_body
    padded = BODY[:-1] + b" " * (limit - len(BODY)) + b"}"
    assert post(shared_gateway, gzip.compress(padded)).status_code == 200
    assert post(shared_gateway, gzip.compress(padded[:-1] + b" }")).status_code == 413
    bomb = gzip.compress(bytes(1 << 28), 1)
    assert len(bomb) > limit  # refused by its own size
    assert post(shared_gateway, bomb).status_code == 413
    assert post(shared_gateway, gzip.compress(bytes(1 << 26), 9)).status_code == 413


BROKEN: dict[str, tuple[bytes, str]] = {
    "no gzip": (BODY, "is not gzip"),
    "cut": (gzip.compress(BODY)[:-9], "ends before its gzip data does"),
    "empty": (b"", "ends before its gzip data does"),
    "wrong sum": (gzip.compress(BODY)[:-8] + bytes(8), "is not gzip"),
    "more after it": (gzip.compress(BODY) + b"{}", "goes on after its gzip data"),
    "of zlib": (zlib.compress(BODY), "is not gzip"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_gzip_is_refused(shared_gateway: Running, name: str) -> None:
    content, says = BROKEN[name]
    reply = post(shared_gateway, content)
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request")
    assert says in reply.json()["error"]["message"]


@pytest.mark.parametrize("encoding", ["br", "deflate", "zstd", "gzip, gzip"])
def test_other_encodings_answer_415_with_what_is_accepted(shared_gateway: Running, encoding: str) -> None:
    reply = post(shared_gateway, BODY, encoding)
    assert (reply.status_code, reply.headers["accept-encoding"]) == (415, "gzip, identity")
    assert "send the body as gzip or identity" in reply.json()["error"]["message"]


def test_uploads_are_sent_as_they_are(shared_gateway: Running, pirate: dict[str, Any]) -> None:
    client = shared_gateway.client(**{"content-encoding": "gzip"})
    for reply in (
        client.post("/deploy/pirate", files=pirate),
        client.post("/v1/files", files={"file": ("a", b"{}")}, data={"purpose": "batch"}),
    ):
        assert (reply.status_code, reply.headers["accept-encoding"]) == (415, "identity")
