"""Check that a store honours conditional writes. Some S3-compatible servers ignore the conditions, so that concurrent
deploys would be lost."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from adapters.errors import Conflict, InvalidRequest, NotFound, PreconditionFailed
from adapters.s3_calls import Refused
from adapters.s3_store import S3Store
from adapters.s3_upload import upload
from adapters.store import ObjectStore

FOLDER = "probes"
NO_ETAG = "0" * 32


def check_conditions(store: ObjectStore) -> None:
    """Tests writes whose conditions are met and not met, with a small object that is deleted afterwards.

    Raises InvalidRequest when the store ignores a condition, and StoreUnavailable when it does not answer or refuses
    access.
    """
    key = f"{FOLDER}/{uuid.uuid4().hex}"
    try:
        _must_fail(lambda: store.put_if_match(key, b"0", NO_ETAG), "If-Match where there is no object")
        etag = store.put_if_absent(key, b"1")
        _must_fail(lambda: store.put_if_absent(key, b"2"), "If-None-Match: *")
        _must_fail(lambda: store.put_if_match(key, b"3", NO_ETAG), "If-Match with another ETag")
        if isinstance(store, S3Store):
            _must_fail(lambda: _upload_if_absent(store, key), "If-None-Match: * when an upload in parts is completed")
        if store.get(key).etag != etag:
            raise _refusal("changes an object although the condition of a write is not met")
        store.put_if_match(key, b"4", etag)
        if store.get(key).data != b"4" or store.get_range(key, 0, 2) != b"4":
            raise _refusal("does not read back what was written")
    except (Conflict, PreconditionFailed, NotFound) as error:
        raise _refusal(f"refuses a write, or a read, whose condition is met ({error})") from error
    finally:
        store.delete(key)


def _must_fail(write: Callable[[], object], condition: str) -> None:
    try:
        write()
    except (Conflict, PreconditionFailed):
        return
    raise _refusal(f"ignores {condition}")


def _upload_if_absent(store: S3Store, key: str) -> None:
    target = store.target(key)
    try:
        upload(store.calls, store.pool, target["Key"], b"5", {}, {"IfNoneMatch": "*"})
    except Refused as refused:
        if refused.status == 412:
            raise Conflict(key) from None
        raise


def _refusal(what: str) -> InvalidRequest:
    return InvalidRequest("registry", f"this S3 store {what}: deploys would be lost; use one with conditional writes")
