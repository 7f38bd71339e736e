"""Which store a registry's address names."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from adapters.errors import InvalidRequest
from adapters.local_store import LocalStore
from adapters.s3_url import parse_s3_url
from adapters.store import ObjectStore


def open_store(url: str) -> ObjectStore:
    """The store at `url`: a directory's path or `file://` URL (made if it does not exist), or `s3://bucket/prefix`.

    Nothing is sent to S3 yet. Raises InvalidRequest for another scheme, StoreUnavailable when the store can't be used.
    """
    parts = urlsplit(url)
    if parts.scheme == "":
        return LocalStore(Path(url))
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return LocalStore(Path(parts.path))
    if parts.scheme == "s3":
        place = parse_s3_url(url)
        from adapters.s3_store import S3Store  # boto3 takes time and memory that a directory should not cost

        return S3Store(place)
    raise InvalidRequest(
        "registry", f"unknown registry {url[:200]!r}; expected a directory's path, a file:// URL or s3://bucket/prefix"
    )


def open_checked_store(url: str) -> ObjectStore:
    """`open_store`, for those who write: a store on S3 is made to show that it keeps conditions.

    Raises InvalidRequest also for one that does not, StoreUnavailable also when it does not answer.
    """
    store = open_store(url)
    if not isinstance(store, LocalStore):
        from adapters.s3_probe import check_conditions

        check_conditions(store)
    return store
