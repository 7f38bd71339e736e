"""Which store a registry's address names."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from adapters.errors import InvalidRequest
from adapters.local_store import LocalStore
from adapters.store import ObjectStore


def open_store(url: str) -> ObjectStore:
    """The store at `url`: a directory's path or `file://` URL (made if it does not exist).

    Raises InvalidRequest for another scheme.
    """
    parts = urlsplit(url)
    if parts.scheme == "":
        return LocalStore(Path(url))
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return LocalStore(Path(parts.path))
    if parts.scheme == "s3":
        raise InvalidRequest("registry", "registries on S3 are not built yet; use a directory")
    raise InvalidRequest("registry", f"unknown registry {url[:200]!r}; expected a directory's path or file:// URL")
