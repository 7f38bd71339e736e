"""Immutable content in the store: the original files of adapters by their hash, and serving artifacts by their digest.

Content that no manifest names (a deploy died) may be removed once it is 24 h old, so what a deploy meets is written
anew when it is half that old.
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from adapters.artifact import artifact_key, write_artifact
from adapters.base_model import BaseModel
from adapters.errors import Conflict, CorruptArtifact, InvalidAdapter, StoreUnavailable
from adapters.functions import Manifest
from adapters.store import ObjectStore
from adapters.validate import Inspection, LoraLayout, check_values, file_sha256

Inspect = Callable[[bytes, Path], Inspection]
"""Of a config and a weights file; raises InvalidAdapter, TooLarge, InspectionBusy."""
REWRITE_SECONDS = 12 * 3600.0
READ_BYTES = 8 << 20
MAX_REFUSED = 1000
"""Refusals that are remembered."""


class Contents:
    """Blobs and artifacts for one base model. Methods block; they may be called from any thread."""

    def __init__(self, store: ObjectStore, base: BaseModel, inspect: Inspect) -> None:
        self.store = store
        self.base = base
        self._inspect = inspect
        self._remaking = threading.Lock()
        self._refused: dict[str, InvalidAdapter] = {}

    def put_files(self, layout: LoraLayout, config: bytes, weights: Path) -> None:
        """Store both original files and the artifact, unless they are there and young."""
        self._put(blob_key(hashlib.sha256(config).hexdigest()), config)
        self._put(blob_key(layout.weights_sha256), weights)
        self.put_artifact(layout, weights)

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
        with self._remaking, _scratch() as folder:
            if self.has_artifact(manifest.digest):
                return  # another thread made it while this one waited
            if manifest.digest in self._refused:
                raise InvalidAdapter(self._refused[manifest.digest].problems)
            weights = folder / "weights"
            self._fetch(blob_key(manifest.weights_sha256), weights)
            if file_sha256(weights) != manifest.weights_sha256:
                raise CorruptArtifact(f"the stored weights of {manifest.digest} were changed")
            config = self.store.get(blob_key(manifest.config_sha256)).data
            self.put_artifact(self._validated(manifest.digest, config, weights), weights)

    def _validated(self, digest: str, config: bytes, weights: Path) -> LoraLayout:
        """The checked adapter, with refusals remembered: the files can't change, and each look reads all tensors."""
        try:
            return check_values(self._inspect(config, weights), weights)
        except InvalidAdapter as error:
            if len(self._refused) >= MAX_REFUSED:
                self._refused.clear()
            self._refused[digest] = error
            raise

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
