"""Opening of the store at a registry's address. To add a kind of store, write an ObjectStore in a separate module and
add an entry to STORES."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from adapters.errors import InvalidRequest
from adapters.local_store import LocalStore
from adapters.s3_url import parse_s3_url
from adapters.store import ObjectStore


class StoreKind(msgspec.Struct, frozen=True):
    """Kind of store for addresses of one scheme."""

    form: str
    """Form of such an address, for error messages."""
    check: Callable[[str], object]
    """Function that raises InvalidRequest for an invalid address. It checks only the text."""
    open: Callable[[str], ObjectStore]
    remote: bool = False
    """True: the store is reached over a network, and whether it honours conditional writes depends on its server."""


def _folder(url: str) -> Path:
    parts = urlsplit(url)
    if parts.scheme == "":
        return Path(url)
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise _unknown(url)
    return Path(parts.path)


def _open_s3(url: str) -> ObjectStore:
    place = parse_s3_url(url)
    from adapters.s3_store import S3Store  # imported late: boto3 takes time and memory that a directory does not need

    return S3Store(place)


DIRECTORY = StoreKind("a directory's path, a file:// URL", _folder, lambda url: LocalStore(_folder(url)))
STORES = {
    "": DIRECTORY,
    "file": DIRECTORY,
    "s3": StoreKind("s3://bucket/prefix", parse_s3_url, _open_s3, remote=True),
}
"""Kinds of stores by URL scheme; an address without a scheme is a path."""


def store_kind(url: str) -> StoreKind:
    """Returns the kind of store of the address. Raises InvalidRequest for an unknown scheme."""
    is_path = "://" not in url and not urlsplit(url).scheme  # s3:/bucket is neither a path nor an address
    kind = STORES.get("" if is_path else url.partition("://")[0])
    if kind is None:
        raise _unknown(url)
    return kind


def _unknown(url: str) -> InvalidRequest:
    forms = " or ".join(dict.fromkeys(kind.form for kind in STORES.values()))
    return InvalidRequest("registry", f"unknown registry {url[:200]!r}; expected {forms}")


def open_store(url: str) -> ObjectStore:
    """Returns the store at `url`, an address of one of the STORES. A missing directory is created.

    Sends nothing over a network yet. Raises InvalidRequest for an invalid address, and StoreUnavailable when the store
    can't be used.
    """
    return store_kind(url).open(url)


def open_checked_store(url: str) -> ObjectStore:
    """Returns the store at `url` like `open_store`, for writers: a remote store is first tested for conditional writes.

    Also raises InvalidRequest for a store that ignores conditions, and StoreUnavailable for one that does not answer.
    """
    store = open_store(url)
    if store_kind(url).remote:
        from adapters.s3_probe import check_conditions

        check_conditions(store)
    return store
