"""Verification names each listed object that is missing or changed, and whose it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from peft_files import variant

from adapters.base_model import BaseModel
from adapters.deployment import AdapterUpload
from adapters.registry import Registry
from adapters.store import ObjectStore
from adapters.verify import Damage, Verified, verify

Good = tuple[bytes, Path]


@pytest.fixture
def registry(new_store: Callable[[], ObjectStore], base: BaseModel, good: Good) -> Registry:
    """Two functions of one adapter, and one of another; they share the weights' file."""
    registry = Registry(new_store(), base)
    registry.deploy("acme", "f", AdapterUpload(*good))
    registry.deploy("other", "f", AdapterUpload(*good))
    registry.deploy("other", "g", AdapterUpload(*variant(good, 9)))
    return registry


def damages(store: ObjectStore) -> tuple[Verified, set[Damage]]:
    told: list[Damage] = []
    done = verify(store, on_damage=told.append)
    assert len(told) == len(set(told))
    return done, set(told)


def test_a_sound_registry(registry: Registry) -> None:
    registry.store.put("blobs/sha256/" + "00" * 32, b"an orphan's content does not matter")
    done, told = damages(registry.store)
    assert (done, told) == (Verified(versions=3, objects=3 + 2 + 1 + 2, damaged=0), set())


@pytest.mark.parametrize("part", ["config", "weights", "artifact"])
@pytest.mark.parametrize("harm", ["missing", "flipped", "cut"])
def test_content_that_was_harmed(registry: Registry, part: str, harm: str) -> None:
    manifest = registry.manifest("acme", "f", 1)
    key = {
        "config": f"blobs/sha256/{manifest.config_sha256}",
        "weights": f"blobs/sha256/{manifest.weights_sha256}",
        "artifact": f"artifacts/v1/{manifest.base}/{manifest.digest}",
    }[part]
    data = registry.store.get(key).data
    match harm:
        case "missing":
            registry.store.delete(key)
        case "flipped":
            registry.store.put(key, data[:-65] + bytes([data[-65] ^ 1]) + data[-64:])
        case "cut":
            registry.store.put(key, data[: len(data) // 2])
    done, told = damages(registry.store)
    owners = {"acme/f:1", "other/f:1"} | ({"other/g:1"} if part == "weights" else set())
    assert {(damage.version, damage.key) for damage in told} == {(owner, key) for owner in owners}
    assert all(
        ("is missing" if harm == "missing" else "differs from what was written") in entry.problem for entry in told
    )
    assert done.damaged == len(owners)


def test_manifests_that_were_harmed(registry: Registry) -> None:
    folder = "tenants/{}/functions/{}/versions/1.json"
    registry.store.delete(folder.format("acme", "f"))
    registry.store.put(folder.format("other", "f"), b"{}")
    key, digest = folder.format("other", "g"), registry.manifest("other", "g", 1).digest
    registry.store.put(key, registry.store.get(key).data.replace(digest.encode(), b"0" * 64))
    _, told = damages(registry.store)
    assert {(damage.version, damage.problem) for damage in told} == {
        ("acme/f:1", "is missing"),
        ("other/f:1", "is no manifest"),
        ("other/g:1", f"names the digest {'0' * 64}, the function {digest}"),
    }


def test_what_was_deleted_is_not_looked_at(registry: Registry) -> None:
    registry.delete_function("acme", "f")
    registry.store.delete("tenants/acme/functions/f/versions/1.json")
    done, told = damages(registry.store)
    assert (done.versions, told) == (2, set())
