"""A damaged artifact is made again from the stored files; where these are damaged too, the version says so for good."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from adapters import contents
from adapters.artifact import artifact_key
from adapters.blobs import blob_key
from adapters.deployment import AdapterUpload
from adapters.errors import CorruptArtifact
from adapters.registry import Registry

Damages = dict[str, Callable[[bytes, random.Random], bytes]]


def flipped(data: bytes, draw: random.Random) -> bytes:
    """Of the artifact's header, its layers or the end of the file; padding after the header vouches for nothing."""
    at = draw.choice([draw.randrange(0, 400), len(data) - 1 - draw.randrange(0, 400)])
    return data[:at] + bytes([data[at] ^ (1 << draw.randrange(8))]) + data[at + 1 :]


DAMAGES: Damages = {
    "flipped": flipped,
    "cut": lambda data, draw: data[: draw.randrange(len(data))],
    "empty": lambda data, draw: b"",
    "other": lambda data, draw: draw.randbytes(len(data)),
}


@pytest.fixture
def key(registry: Registry, good: tuple[bytes, Path]) -> str:
    """Of a deployed version's artifact."""
    return artifact_key(registry.base.fingerprint, registry.deploy("acme", "f", AdapterUpload(*good)).digest)


@pytest.mark.parametrize("kind", DAMAGES)
def test_it_is_made_again_byte_for_byte(registry: Registry, key: str, kind: str) -> None:
    whole, draw = registry.store.get(key).data, random.Random(kind)
    for _ in range(20):
        registry.store.put(key, DAMAGES[kind](whole, draw))
        assert registry.make_artifact("acme", "f", 1)
        assert registry.store.get(key).data == whole


def test_one_that_is_missing_is_made_again(registry: Registry, key: str) -> None:
    whole = registry.store.get(key).data
    registry.store.delete(key)
    assert registry.make_artifact("acme", "f", 1) == "is missing"
    assert registry.store.get(key).data == whole


def test_one_that_is_whole_is_not_written(registry: Registry, key: str) -> None:
    before = registry.store.head(key)
    assert registry.make_artifact("acme", "f", 1) == ""
    assert registry.store.head(key) == before


@pytest.mark.parametrize("missing", [False, True])
def test_damaged_files_are_told_until_they_are_mended(
    registry: Registry, key: str, missing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = blob_key(registry.manifest("acme", "f", 1).weights_sha256)
    kept = registry.store.get(blob).data
    registry.store.put(key, b"damaged")
    registry.store.put(blob, b"damaged too")
    if missing:
        registry.store.delete(blob)
    says = f"the stored files of version 1 of function f are {'missing' if missing else 'damaged'}"
    with pytest.raises(CorruptArtifact, match=says):
        registry.make_artifact("acme", "f", 1)
    with pytest.raises(CorruptArtifact, match=says):
        registry.resolve("acme", "f")
    registry.store.put(blob, kept)
    with pytest.raises(CorruptArtifact, match=says):  # not read again at once
        registry.make_artifact("acme", "f", 1)
    assert [choice.pending for choice in registry.choices("acme", "f")] == [False]
    later = time.monotonic() + contents.DAMAGED_SECONDS + 1
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert [(choice.damaged != "", choice.pending) for choice in registry.choices("acme", "f")] == [(True, True)]
    assert registry.make_artifact("acme", "f", 1)
    assert registry.resolve("acme", "f").version == 1


def test_the_adapter_deployed_again_mends_it(registry: Registry, key: str, good: tuple[bytes, Path]) -> None:
    whole = registry.store.get(key).data
    registry.store.put(key, b"damaged")
    registry.store.put(blob_key(registry.manifest("acme", "f", 1).weights_sha256), b"damaged too")
    with pytest.raises(CorruptArtifact):
        registry.make_artifact("acme", "f", 1)
    elsewhere = Registry(registry.store, registry.base)
    assert not elsewhere.deploy("acme", "f", AdapterUpload(*good)).created
    assert registry.store.get(key).data == whole
    assert registry.resolve("acme", "f").version == 1
