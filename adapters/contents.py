"""Immutable content in the store: original adapter files by their hash, and serving artifacts by their digest.

A base that only vLLM serves has no artifacts: its nodes read the original files.

Content that no manifest names, for instance because a deploy died, may be removed once it is 24 h old. A deploy
therefore rewrites content that is 12 h old or more.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from adapters.artifact import READ_BYTES, artifact_key, artifact_problem, blob_problem, write_artifact
from adapters.base_model import BaseModel
from adapters.blobs import blob_key
from adapters.errors import Conflict, CorruptArtifact, InvalidAdapter, NotFound
from adapters.full_disk import store_error
from adapters.functions import Manifest
from adapters.store import ObjectStore
from adapters.validate import Inspection, LoraLayout, check_values, file_sha256

Inspect = Callable[[bytes, Path], Inspection]
"""Function that inspects a config and a weights file. It raises InvalidAdapter, TooLarge or InspectionBusy."""
Unmakeable = InvalidAdapter | CorruptArtifact
REWRITE_SECONDS = 12 * 3600.0
MAX_FITTING = 100_000
"""Maximum number of remembered adapters that fit a base without artifacts."""
MAX_FAILURES = 1000
"""Maximum number of remembered failures to build artifacts."""
DAMAGED_SECONDS = 30.0
"""Seconds for which damaged files are not read again. After that they may have been repaired."""


@dataclass(frozen=True)
class Failure:
    """Reason why an artifact can't be built, and the time until which no new attempt is made."""

    error: Unmakeable
    until: float
    """Monotonic time in seconds at which building may be tried again."""
    written: float | None
    """Unix time (store's clock) at which the damaged artifact was stored; None: there is none."""

    @property
    def expired(self) -> bool:
        """True: building the artifact may be tried again."""
        return time.monotonic() >= self.until


class Contents:
    """Blobs and artifacts for one base model. Methods block, and may be called from any thread."""

    def __init__(self, store: ObjectStore, base: BaseModel, inspect: Inspect) -> None:
        self.store = store
        self.base = base
        self._inspect = inspect
        self._failures: dict[str, Failure] = {}
        """Failures by digest."""
        self._fitting = set[str]()
        """Digests of adapters that fit a base without artifacts."""

    def put_files(self, layout: LoraLayout, config: bytes, weights: Path) -> None:
        """Stores both original files, and the artifact if the base has them, except those that exist and are younger
        than REWRITE_SECONDS."""
        self._put(blob_key(hashlib.sha256(config).hexdigest()), config)
        self._put(blob_key(layout.weights_sha256), weights)
        if self.base.has_artifacts and not self._is_young(artifact_key(self.base.fingerprint, layout.digest)):
            self.put_artifact(layout, weights)
        self._record_success(layout.digest)

    def keys(self, layout: LoraLayout, config: bytes) -> Sequence[str]:
        """Returns the keys of the objects that `put_files` stores."""
        blobs = blob_key(hashlib.sha256(config).hexdigest()), blob_key(layout.weights_sha256)
        return (*blobs, artifact_key(self.base.fingerprint, layout.digest)) if self.base.has_artifacts else blobs

    def repair(self, layout: LoraLayout, config: bytes, weights: Path) -> None:
        """Stores what nodes load of a deployed adapter again, if it is missing or damaged: the artifact, or the
        original files if the base has none."""
        if self.base.has_artifacts:
            if self.artifact_problem(layout.digest):
                self.put_artifact(layout, weights)
            return
        files: tuple[tuple[str, bytes | Path], ...] = (
            (hashlib.sha256(config).hexdigest(), config),
            (layout.weights_sha256, weights),
        )
        for sha256, data in files:
            if blob_problem(self.store, sha256):
                self._write(blob_key(sha256), data)
        self._record_success(layout.digest)

    def put_artifact(self, layout: LoraLayout, weights: Path) -> None:
        """Builds and stores the artifact, replacing an existing one."""
        with _scratch() as folder:
            out = folder / "artifact"
            write_artifact(layout, self.base, weights, out)
            self._write(artifact_key(self.base.fingerprint, layout.digest), out)
        self._failures.pop(layout.digest, None)

    def is_ready(self, digest: str) -> bool:
        """Returns whether an adapter of another base can be loaded for the current one: an artifact for it is stored
        (its content is not checked), or the adapter was found to fit, if the base has no artifacts."""
        return self._written(digest) is not None if self.base.has_artifacts else digest in self._fitting

    def artifact_problem(self, digest: str) -> str:
        """Reads the complete artifact, and returns its problem; empty if it is intact."""
        return artifact_problem(self.store, self.base.fingerprint, digest)

    def ensure_artifact(self, manifest: Manifest) -> str:
        """Builds the artifact for the current base from the stored files, if it is missing or damaged. Only checks the
        files if the base has no artifacts. Returns the problem of the existing artifact; "" if it was intact.

        Raises InvalidAdapter when the adapter does not fit this base, and CorruptArtifact when a stored file was
        changed.
        """
        problem = self.artifact_problem(manifest.digest) if self.base.has_artifacts else ""
        if not problem and self.base.has_artifacts:
            self._failures.pop(manifest.digest, None)
            return ""
        failure = self.failure(manifest.digest)
        if failure is not None and not failure.expired:
            raise _copy(failure.error)
        try:
            with _scratch() as folder:
                weights = folder / "weights"
                config = self._fetch_files(manifest, weights)
                layout = check_values(self._inspect(config, weights), weights)
                if self.base.has_artifacts:
                    self.put_artifact(layout, weights)
                else:
                    self._record_success(manifest.digest)
        except InvalidAdapter as error:
            self._record_failure(manifest.digest, error, math.inf)  # the files can't change
            raise
        except CorruptArtifact as error:
            self._record_failure(manifest.digest, error, time.monotonic() + DAMAGED_SECONDS)
            raise
        return problem

    def failure(self, digest: str) -> Failure | None:
        """Returns the last failure to build the artifact. Returns None if no attempt failed, or if another artifact has
        been stored since. Failures are remembered because each attempt reads all tensors."""
        failure = self._failures.get(digest)
        return failure if failure is not None and failure.written == self._written(digest) else None

    def _record_success(self, digest: str) -> None:
        self._failures.pop(digest, None)
        if not self.base.has_artifacts:
            if len(self._fitting) >= MAX_FITTING:
                self._fitting.clear()
            self._fitting.add(digest)

    def _record_failure(self, digest: str, error: Unmakeable, until: float) -> None:
        if len(self._failures) >= MAX_FAILURES:
            self._failures.clear()
        self._failures[digest] = Failure(_copy(error), until, self._written(digest))

    def _written(self, digest: str) -> float | None:
        """Returns the Unix time (store's clock) at which the artifact was stored; None if there is none."""
        if not self.base.has_artifacts:
            return None
        info = self.store.head(artifact_key(self.base.fingerprint, digest))
        return None if info is None else info.modified

    def _fetch_files(self, manifest: Manifest, weights: Path) -> bytes:
        """Writes the stored weights to the file `weights`, and returns the config. Raises CorruptArtifact unless both
        are as deployed."""
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
        if not self._is_young(key):
            self._write(key, data)

    def _write(self, key: str, data: bytes | Path) -> None:
        try:
            self.store.put_if_absent(key, data)
        except Conflict:
            # Old, damaged, or just written by another deploy: the content is the same, and becomes young and whole.
            self.store.put(key, data)

    def _fetch(self, key: str, out: Path) -> None:
        start = 0
        with out.open("wb") as stream:
            while data := self.store.get_range(key, start, READ_BYTES):
                stream.write(data)
                start += len(data)


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """Yields a folder for temporary files, which is removed afterwards. Converts OSError (a full or broken disk) to
    StoreFull or StoreUnavailable."""
    try:
        # The outcome does not depend on the removal, which a disk that has become read-only refuses.
        with tempfile.TemporaryDirectory(prefix="garnish-", ignore_cleanup_errors=True) as folder:
            yield Path(folder)
    except OSError as error:
        raise store_error(error, "temporary files can't be used") from error


def _copy(error: Unmakeable) -> Unmakeable:
    """Returns a copy of the error without its traceback, which would keep the files' contents in memory."""
    return InvalidAdapter(error.problems) if isinstance(error, InvalidAdapter) else CorruptArtifact(str(error))
