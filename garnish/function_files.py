"""The files that a version of a function was deployed with, from the registry or from a folder that is named."""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from adapters.contents import blob_key
from adapters.errors import AdapterError
from adapters.open_store import open_store
from adapters.store import ObjectStore
from garnish.adapter_folder import CONFIG_FILE, WEIGHTS_FILE, adapter_files
from garnish.errors import FrontDoorError
from gateway.routes.functions import VersionReply

READ_BYTES = 8 << 20


@contextlib.contextmanager
def registry_folder(registry: str, version: VersionReply) -> Iterator[Path]:
    """Provides a temporary folder with the version's two files, read from the registry and checked against their
    hashes.

    Raises FrontDoorError when the registry does not give them, or they were changed.
    """
    elsewhere = "name the folder that was deployed with --adapter"
    if "://" not in registry and not Path(registry).is_dir():
        raise FrontDoorError(f"there is no registry {registry} here: {elsewhere}")
    with tempfile.TemporaryDirectory(prefix="garnish-") as folder:
        try:
            store = open_store(registry)
            _copy(store, version.config_sha256, Path(folder) / CONFIG_FILE)
            _copy(store, version.weights_sha256, Path(folder) / WEIGHTS_FILE)
        except AdapterError as error:
            raise FrontDoorError(
                f"the registry {registry} does not give the files of {version.function}:{version.version} "
                f"({error}): {elsewhere}"
            ) from None
        yield Path(folder)


@contextlib.contextmanager
def named_folder(folder: Path, version: VersionReply) -> Iterator[Path]:
    """Provides the folder itself, if its files are those of the version. Raises FrontDoorError."""
    files = adapter_files(folder, "--adapter {}")
    found = tuple(_sha256(file) for file in (files.config, files.weights))
    if found != (version.config_sha256, version.weights_sha256):
        other = CONFIG_FILE if found[1] == version.weights_sha256 else WEIGHTS_FILE
        name = f"{version.function}:{version.version}"
        raise FrontDoorError(f"{folder} is not what {name} was deployed with: another {other}")
    yield folder


def _copy(store: ObjectStore, sha256: str, target: Path) -> None:
    whole, start = hashlib.sha256(), 0
    with target.open("wb") as out:
        while data := store.get_range(blob_key(sha256), start, READ_BYTES):
            out.write(data)
            whole.update(data)
            start += len(data)
    if whole.hexdigest() != sha256:
        raise FrontDoorError(f"{target.name} in the registry was changed: `garnish registry verify` names what else is")


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
