"""Immutable content in the store: the original files of adapters by their hash, and serving artifacts by their digest.

Content that no manifest names (a deploy died) may be removed once it is 24 h old, so what a deploy meets is written
anew when it is half that old.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from adapters.artifact import artifact_key, write_artifact
from adapters.base_model import BaseModel
from adapters.errors import AdapterError, Conflict, CorruptArtifact, InvalidAdapter, NotFound, StoreUnavailable
from adapters.functions import Manifest
from adapters.store import ObjectStore
from adapters.validate import Inspection, LoraLayout, check_values, file_sha256

Inspect = Callable[[bytes, Path], Inspection]
"""Of a config and a weights file; raises InvalidAdapter, TooLarge, InspectionBusy."""
REWRITE_SECONDS = 12 * 3600.0
READ_BYTES = 8 << 20
MAX_FAILURES = 1000
"""Reasons why artifacts can't be made that are remembered."""
DAMAGED_SECONDS = 30.0
"""For which damaged files are not read again: someone may mend them."""


class Contents:
    """Blobs and artifacts for one base model. Methods block; they may be called from any thread."""

    def __init__(self, store: ObjectStore, base: BaseModel, inspect: Inspect) -> None:
        self.store = store
        self.base = base
        self._inspect = inspect
        self._failures: dict[str, tuple[AdapterError, float]] = {}
        """Why artifacts can't be made, with the monotonic seconds until which that holds."""

    def put_files(self, layout: LoraLayout, config: bytes, weights: Path) -> None:
        """Store both original files and the artifact, unless they are there and young."""
        self._put(blob_key(hashlib.sha256(config).hexdigest()), config)
        self._put(blob_key(layout.weights_sha256), weights)
        self.put_artifact(layout, weights)

    def keys(self, layout: LoraLayout, config: bytes) -> Sequence[str]:
        """Of what `put_files` stores."""
        blobs = blob_key(hashlib.sha256(config).hexdigest()), blob_key(layout.weights_sha256)
        return *blobs, artifact_key(self.base.fingerprint, layout.digest)

    def put_artifact(self, layout: LoraLayout, weights: Path) -> None:
        """Make and store the artifact, unless it is there and young."""
        key = artifact_key(self.base.fingerprint, layout.digest)
        if self._is_young(key):
            return
        with _scratch() as folder:
            out = folder / "artifact"
            write_artifact(layout, self.base, weights, out)
            self._put(key, out)

    def has_artifact(self, digest: str) -> bool:
        return self.store.head(artifact_key(self.base.fingerprint, digest)) is not None

    def ensure_artifact(self, manifest: Manifest) -> None:
        """Make the artifact for the present base from the stored files, if there is none.

        Raises InvalidAdapter when the adapter does not fit this base, CorruptArtifact when a stored file was changed.
        """
        if self.has_artifact(manifest.digest):
            return
        self.check_failure(manifest.digest)
        try:
            with _scratch() as folder:
                weights = folder / "weights"
                config = self._fetch_files(manifest, weights)
                self.put_artifact(check_values(self._inspect(config, weights), weights), weights)
        except InvalidAdapter as error:
            self._note_failure(manifest.digest, error, math.inf)  # the files can't change
            raise
        except CorruptArtifact as error:
            self._note_failure(manifest.digest, error, time.monotonic() + DAMAGED_SECONDS)
            raise

    def check_failure(self, digest: str) -> None:
        """Raises what the artifact could not be made for a while ago: each try reads all tensors."""
        error, until = self._failures.get(digest, (None, 0.0))
        if isinstance(error, InvalidAdapter):
            raise InvalidAdapter(error.problems)
        if isinstance(error, CorruptArtifact) and time.monotonic() < until:
            raise CorruptArtifact(str(error))

    def _note_failure(self, digest: str, error: AdapterError, until: float) -> None:
        if len(self._failures) >= MAX_FAILURES:
            self._failures.clear()
        self._failures[digest] = error, until

    def _fetch_files(self, manifest: Manifest, weights: Path) -> bytes:
        """The weights go to the file; returns the config. Raises CorruptArtifact unless both are what was deployed."""
        name = f"version {manifest.version} of function {manifest.function}"
        try:
            self._fetch(blob_key(manifest.weights_sha256), weights)
            config = self.store.get(blob_key(manifest.config_sha256)).data
        except NotFound:
            raise CorruptArtifact(f"the stored files of {name} are missing: deploy the adapter again") from None
        hashes = file_sha256(weights), hashlib.sha256(config).hexdigest()
        if hashes != (manifest.weights_sha256, manifest.config_sha256):
            raise CorruptArtifact(f"the stored files of {name} are damaged: deploy the adapter again")
        return config

    def _is_young(self, key: str) -> bool:
        info = self.store.head(key)
        return info is not None and self.store.now() - info.modified < REWRITE_SECONDS

    def _put(self, key: str, data: bytes | Path) -> None:
        if self._is_young(key):
            return
        try:
            self.store.put_if_absent(key, data)
        except Conflict:
            # Old, or just written by another deploy: the content is the same, so writing it again only makes it young.
            self.store.put(key, data)

    def _fetch(self, key: str, out: Path) -> None:
        start = 0
        with out.open("wb") as stream:
            while data := self.store.get_range(key, start, READ_BYTES):
                stream.write(data)
                start += len(data)


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """A folder for temporary files. A full or broken disk becomes StoreUnavailable."""
    try:
        with tempfile.TemporaryDirectory(prefix="garnish-") as folder:
            yield Path(folder)
    except OSError as error:
        raise StoreUnavailable(f"temporary files can't be used ({error.strerror or 'I/O error'})") from error


def blob_key(sha256: str) -> str:
    """Where an original file is kept."""
    return f"blobs/sha256/{sha256}"
