"""Garbage collection takes what nobody lists once it is old, and nothing else, whoever deploys meanwhile."""

from __future__ import annotations

import os
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from peft_files import variant

from adapters.base_model import BaseModel
from adapters.blobs import blob_key
from adapters.collect import ORPHAN_SECONDS, Collected, collect
from adapters.deployment import AdapterUpload
from adapters.epoch import EPOCH_KEY
from adapters.errors import CorruptArtifact, NotFound, StoreUnavailable
from adapters.functions import FunctionRecord, Manifest, VersionEntry
from adapters.local_store import LocalStore
from adapters.registry import Registry
from adapters.store import ObjectStore, all_objects
from adapters.verify import verify

Good = tuple[bytes, Path]
HEX = "ab" * 32


@pytest.fixture
def store(new_store: Callable[[], ObjectStore]) -> ObjectStore:
    return new_store()


def keys(store: ObjectStore) -> set[str]:
    """Of all objects but the epoch."""
    return {info.key for info in all_objects(store, "")} - {EPOCH_KEY}


def needed(registry: Registry, *functions: tuple[str, str]) -> set[str]:
    """What the functions' versions are made of, by the registry's own reading."""
    found = set()
    for tenant, name in functions:
        for manifest in registry.versions(tenant, name):
            found |= {blob_key(manifest.config_sha256), blob_key(manifest.weights_sha256)}
            found |= {
                f"tenants/{tenant}/functions/{name}/versions/{manifest.version}.json",
                f"artifacts/v1/{manifest.base}/{manifest.digest}",
            }
    return found


def age(store: LocalStore, seconds: float = ORPHAN_SECONDS + 60, part: str = "") -> None:
    when = time.time() - seconds
    for info in all_objects(store, "tenants/"):
        if info.key.endswith("function.json") and part in f"/{info.key}":
            record = msgspec.json.decode(store.get(info.key).data, type=FunctionRecord)
            removed = dict.fromkeys(record.removed, when)
            store.put(info.key, msgspec.json.encode(msgspec.structs.replace(record, removed=removed)))
    for path in store.root.rglob("*"):
        if path.is_file() and part in str(path) and not path.relative_to(store.root).parts[0].startswith("."):
            os.utime(path, (when, when))


def test_only_what_nobody_lists_is_removed(store: ObjectStore, base: BaseModel, good: Good) -> None:
    registry = Registry(store, base)
    for tenant, name, alpha in (("acme", "f", 8), ("acme", "f", 9), ("acme", "gone", 10), ("other", "f-2", 9)):
        registry.deploy(tenant, name, AdapterUpload(*variant(good, alpha)))
    registry.delete_function("acme", "gone")
    litter = {f"blobs/sha256/{HEX}", f"artifacts/v1/{HEX}/{HEX}", "tenants/acme/functions/half/versions/1.json"}
    foreign = {
        "blobs/notes",
        "artifacts/v1/readme",
        "tenants/zeta/tenant.json",
        "probes/x",
        "tenants/acme/usage/1/g.json",
    }
    for key in litter | foreign:
        store.put(key, b"{}")
    before = keys(store)
    listed = needed(registry, ("acme", "f"), ("other", "f-2"))
    records = {key for key in before if key.endswith("function.json")}
    orphans = before - listed - records - foreign
    assert litter < orphans
    assert len(orphans) == len(litter) + 3, "and a config, an artifact and a manifest of what was deleted"

    young = collect(store, now=time.time() + ORPHAN_SECONDS - 600)
    assert (young.blobs, young.artifacts, young.manifests, keys(store)) == (0, 0, 0, before)
    told: list[str] = []
    later = time.time() + ORPHAN_SECONDS + 600
    dry = collect(store, dry_run=True, now=later, on_removal=lambda info: told.append(info.key))
    assert set(told) == orphans
    assert keys(store) == before
    done = collect(store, now=later)
    assert keys(store) == before - orphans
    assert msgspec.structs.replace(done, dry_run=True) == dry
    assert (done.blobs, done.artifacts, done.manifests) == (2, 2, 2)

    assert verify(store).damaged == 0
    assert registry.resolve("acme", "f").version == 2
    again = registry.deploy("acme", "gone", AdapterUpload(*good))
    assert again.version == 2, "the tombstone stays, and so do its numbers"
    assert collect(store, now=later) == Collected(dry_run=False, kept=done.kept + 1), "only the new artifact came"


def test_a_young_manifest_keeps_what_it_names(tmp_path: Path, base: BaseModel, good: Good) -> None:
    """Its deploy may still be about to list it."""
    store = LocalStore(tmp_path)
    Registry(store, base).deploy("acme", "f", AdapterUpload(*good))
    (tmp_path / "tenants/acme/functions/f/function.json").unlink()
    age(store, part="/blobs/")
    age(store, part="/artifacts/")
    before = keys(store)
    assert collect(store).manifests == 0
    assert keys(store) == before
    age(store)
    collect(store)
    assert keys(store) == set()


def test_what_was_deleted_a_moment_ago_stays(tmp_path: Path, base: BaseModel, good: Good) -> None:
    """Calls that began before may still load it, however old its files are."""
    store = LocalStore(tmp_path)
    registry = Registry(store, base)
    for alpha in (8, 9):
        registry.deploy("acme", "f", AdapterUpload(*variant(good, alpha)))
    registry.deploy("acme", "g", AdapterUpload(*variant(good, 10)))
    age(store)
    before = keys(store)
    registry.delete_version("acme", "f", 1)
    registry.delete_function("acme", "g")
    assert (collect(store).artifacts, keys(store)) == (0, before)
    age(store)
    assert collect(store).artifacts == 2


def test_later_deletions_do_not_keep_what_earlier_ones_left(tmp_path: Path, base: BaseModel, good: Good) -> None:
    """Else a function that is deployed and tidied up every day would never be collected."""
    store = LocalStore(tmp_path)
    registry = Registry(store, base)
    for alpha in (8, 9, 10):
        registry.deploy("acme", "f", AdapterUpload(*variant(good, alpha)))
    registry.delete_version("acme", "f", 1)
    age(store)
    registry.delete_version("acme", "f", 2)
    assert (collect(store).manifests, len(keys(store))) == (1, 1 + 2 + 3 + 2)


def test_content_written_anew_since_it_was_listed_stays(tmp_path: Path) -> None:
    class Busy(LocalStore):
        def delete_older(self, key: str, before: float) -> bool:
            self.put(key, b"again")  # as a deploy does that meets old content
            return super().delete_older(key, before)

    store = Busy(tmp_path)
    store.put(f"blobs/sha256/{HEX}", b"old")
    age(store)
    assert collect(store) == Collected(dry_run=False, kept=1)
    assert store.get(f"blobs/sha256/{HEX}").data == b"again"


def test_deploys_beside_a_collection(tmp_path: Path, base: BaseModel, good: Good) -> None:
    """All that a delete left is old at once, and is deployed again while collections run without a pause."""
    store = LocalStore(tmp_path)
    registry, ended, rounds, round_ended = Registry(store, base), threading.Event(), [], threading.Semaphore(0)

    def sweep() -> None:
        while not ended.is_set():
            rounds.append(collect(store))
            round_ended.release()

    def await_a_whole_round() -> None:
        while round_ended.acquire(blocking=False):
            pass
        for _ in range(2):  # the first may have looked before
            assert round_ended.acquire(timeout=60)

    thread = threading.Thread(target=sweep)
    thread.start()
    try:
        for turn in range(1, 16):
            assert registry.deploy("acme", "f", AdapterUpload(*good)).version == turn
            assert verify(store).damaged == 0
            registry.delete_function("acme", "f")
            age(store)
            if turn % 3 == 0:
                await_a_whole_round()
                assert not any(key.startswith("blobs/") for key in keys(store))
    finally:
        ended.set()
        thread.join(60)
    assert not thread.is_alive()
    assert sum(done.blobs for done in rounds) >= 5 * 2


@pytest.mark.parametrize("broken", ["versions/1.json", "function.json"])
def test_nothing_is_removed_when_it_is_not_known_what_is_needed(
    store: ObjectStore, base: BaseModel, good: Good, broken: str
) -> None:
    Registry(store, base).deploy("acme", "f", AdapterUpload(*good))
    store.put(f"blobs/sha256/{HEX}", b"orphan")
    store.put(f"tenants/acme/functions/f/{broken}", b"{")
    before = keys(store)
    with pytest.raises((CorruptArtifact, StoreUnavailable)):
        collect(store, now=time.time() + 2 * ORPHAN_SECONDS)
    assert keys(store) == before


def test_a_listed_version_without_manifest_stops_it(store: ObjectStore, base: BaseModel, good: Good) -> None:
    Registry(store, base).deploy("acme", "f", AdapterUpload(*good))
    store.delete("tenants/acme/functions/f/versions/1.json")
    with pytest.raises(CorruptArtifact, match="acme/f:1"):
        collect(store, now=time.time() + 2 * ORPHAN_SECONDS)


def test_memory_does_not_grow_with_the_functions(tmp_path: Path) -> None:
    """Measured up to three times: Python's table of interned names, which is not ours, grows now and then, by
    megabytes."""
    store = LocalStore(tmp_path)

    def peaks(functions: range) -> Iterator[int]:
        for number in functions:
            _write_function(tmp_path, number)
        return (_traced(lambda: collect(store, now=time.time() + 2 * ORPHAN_SECONDS)) for _ in range(3))

    few = min(peaks(range(500)))
    assert any(many < 1.5 * few for many in peaks(range(500, 2000)))


def _traced(run: Callable[[], Collected]) -> int:
    """Returns the most bytes that a collection takes, which finds nothing."""
    tracemalloc.start()
    try:
        assert run().manifests == 0
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _write_function(root: Path, number: int) -> None:
    """Straight into the directory: the store would sync each file."""
    digest = f"{number:064x}"
    entry = VersionEntry(1, digest, "base", (4,), ("q",), 100, 0.0, 2)
    record = FunctionRecord(name=f"f{number}", created=0.0, next_version=2, versions=(entry,))
    manifest = Manifest(
        function=record.name, version=1, digest=digest, base="base", base_id="b", config_sha256=digest,
        weights_sha256=digest, dtype="float32", ranks=(4,), targets=("q",), bytes=100, warnings=(), created=0.0,
    )  # fmt: skip
    folder = root / "tenants" / "acme" / "functions" / record.name
    (folder / "versions").mkdir(parents=True)
    (folder / "function.json").write_bytes(msgspec.json.encode(record))
    (folder / "versions" / "1.json").write_bytes(msgspec.json.encode(manifest))


def test_delete_older(store: ObjectStore) -> None:
    store.put("a/b", b"x")
    assert not store.delete_older("a/b", time.time() - 3600)
    assert not store.delete_older("a/none", time.time() + 3600)
    assert store.get("a/b").data == b"x"
    assert store.delete_older("a/b", time.time() + 3600)
    with pytest.raises(NotFound):
        store.get("a/b")
