"""Requests for files and batches: `Client.ask` sends them, `Client.download` those for contents."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from garnish.errors import GarnishError
from garnish.protocol import Call, waiting
from gateway.batches.messages import Endpoint

UPLOAD_SECONDS = 600.0


@contextmanager
def upload_call(path: Path) -> Iterator[Call]:
    """Provides the request that uploads a file; the file is open while the request is sent. The reply is
    gateway.batches.messages.FileObject.

    Raises GarnishError when the file can't be read.
    """
    try:
        with path.open("rb") as content:
            yield Call(
                method="POST",
                url="/v1/files",
                data={"purpose": "batch"},
                files={"file": (path.name, content)},
                timeout=waiting(UPLOAD_SECONDS),
            )
    except OSError as error:
        raise GarnishError("invalid_request", f"{path} can't be read: {error.strerror}") from None


def create_call(file_id: str, endpoint: Endpoint) -> Call:
    """Returns the request that makes a batch of an uploaded file. The reply is gateway.batches.messages.Batch, as that
    of `batch_call` and `cancel_call`."""
    body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h"}
    return Call(method="POST", url="/v1/batches", json=body)


def batch_call(batch_id: str) -> Call:
    return Call(method="GET", url=f"/v1/batches/{quote(batch_id, safe='')}")


def cancel_call(batch_id: str) -> Call:
    return Call(method="POST", url=f"/v1/batches/{quote(batch_id, safe='')}/cancel")


def content_call(file_id: str) -> Call:
    return Call(method="GET", url=f"/v1/files/{quote(file_id, safe='')}/content", timeout=waiting(UPLOAD_SECONDS))
