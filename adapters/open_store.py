"""Opens the store that a registry's address names. A further kind of store is an ObjectStore in a separate module, and
an entry in STORES."""

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
    """Store that addresses of one scheme stand for."""

    form: str
    """Form of an address, for error messages."""
    check: Callable[[str], object]
    """Raises InvalidRequest for an address that can't be; looks at nothing else."""
    open: Callable[[str], ObjectStore]
    remote: bool = False
    """Reads cross a network, and whether conditions are kept is another's doing."""


def _folder(url: str) -> Path:
    parts = urlsplit(url)
    if parts.scheme == "":
        return Path(url)
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise _unknown(url)
    return Path(parts.path)


def _open_s3(url: str) -> ObjectStore:
    place = parse_s3_url(url)
    from adapters.s3_store import S3Store  # boto3 takes time and memory that a directory should not cost

    return S3Store(place)


DIRECTORY = StoreKind("a directory's path, a file:// URL", _folder, lambda url: LocalStore(_folder(url)))
STORES = {
    "": DIRECTORY,
    "file": DIRECTORY,
    "s3": StoreKind("s3://bucket/prefix", parse_s3_url, _open_s3, remote=True),
}
"""Maps schemes of addresses to kinds of stores; an address without a scheme is a path."""


def store_kind(url: str) -> StoreKind:
    """Returns what kind of store the address is of. Raises InvalidRequest for a scheme that is not served."""
    kind = STORES.get(url.partition("://")[0] if "://" in url else urlsplit(url).scheme)
    if kind is None:
        raise _unknown(url)
    return kind


def _unknown(url: str) -> InvalidRequest:
    forms = " or ".join(dict.fromkeys(kind.form for kind in STORES.values()))
    return InvalidRequest("registry", f"unknown registry {url[:200]!r}; expected {forms}")


def open_store(url: str) -> ObjectStore:
    """Returns the store at `url`, an address of one of STORES; a directory is made if it does not exist.

    Nothing is sent over a network yet. Raises InvalidRequest for another address, StoreUnavailable when the store can't
    be used.
    """
    return store_kind(url).open(url)


def open_checked_store(url: str) -> ObjectStore:
    """Does what `open_store` does, for those who write: a remote store is made to show that it keeps conditions.

    Raises InvalidRequest also for a store that does not, StoreUnavailable also when it does not answer.
    """
    store = open_store(url)
    if store_kind(url).remote:
        from adapters.s3_probe import check_conditions

        check_conditions(store)
    return store
