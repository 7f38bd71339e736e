from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from peft_files import changed, read_layer, variant

from adapters.artifact import artifact_key, read_header
from adapters.base_model import BaseModel
from adapters.blobs import blob_key
from adapters.deployment import AdapterUpload, Deployment, Staged
from adapters.errors import Conflict, InvalidAdapter, InvalidRequest, NotFound, StoreUnavailable
from adapters.functions import FunctionRecord, Policy, VersionEntry, with_version
from adapters.local_store import LocalStore
from adapters.records import read_record
from adapters.registry import MAX_PASSED, Registry


def deploy(
    registry: Registry, good: tuple[bytes, Path], name: str = "f", staged: Staged | None = None, **options: Any
) -> Deployment:
    return registry.deploy("acme", name, AdapterUpload(*good, **options), staged)


def test_a_deployed_adapter_is_resolved_and_read(registry: Registry, good: tuple[bytes, Path], base: BaseModel) -> None:
    done = deploy(registry, good)
    assert (done.function, done.version, done.ranks, done.targets, done.created) == ("f", 1, (4,), ("q", "v"), True)
    found = registry.resolve("acme", "f")
    assert (found.version, found.digest, found.ranks, found.bytes) == (1, done.digest, (4,), done.bytes)
    assert found.artifact_key == artifact_key(base.fingerprint, done.digest)
    header = read_header(registry.store, found.artifact_key)
    assert header.digest == done.digest
    assert sum(len(read_layer(registry.store, found.artifact_key, header, layer)) for layer in range(3)) >= done.bytes


def test_the_original_files_are_kept(registry: Registry, good: tuple[bytes, Path]) -> None:
    deploy(registry, good, source="s3://bucket/prefix")
    manifest = registry.manifest("acme", "f", 1)
    assert registry.store.get(blob_key(manifest.config_sha256)).data == good[0]
    assert registry.store.get(blob_key(manifest.weights_sha256)).data == good[1].read_bytes()
    assert (manifest.base, manifest.source) == (registry.base.fingerprint, "s3://bucket/prefix")
    assert registry.versions("acme", "f") == [manifest]


def test_the_same_adapter_again_makes_no_version(registry: Registry, good: tuple[bytes, Path]) -> None:
    first = deploy(registry, good)
    second = deploy(registry, (changed(good[0], peft_version="other"), good[1]))
    assert (second.version, second.digest, second.created) == (1, first.digest, False)
    assert deploy(registry, good, name="g").version == 1


def test_aliases_follow_the_contract(registry: Registry, good: tuple[bytes, Path]) -> None:
    def pointers() -> dict[str, dict[str, float]]:
        return {name: alias.weights for name, alias in registry.function("acme", "f").aliases.items()}

    deploy(registry, good, alias="prod")  # a first deploy also sets latest
    assert pointers() == {"prod": {"1": 1.0}, "latest": {"1": 1.0}}
    deploy(registry, variant(good, 9))
    assert pointers() == {"prod": {"1": 1.0}, "latest": {"2": 1.0}}
    deploy(registry, variant(good, 10), alias="prod")  # and then latest stays
    assert pointers() == {"prod": {"3": 1.0}, "latest": {"2": 1.0}}
    deploy(registry, good)  # known already: only the alias moves
    assert pointers() == {"prod": {"3": 1.0}, "latest": {"1": 1.0}}
    latest = registry.function("acme", "f").aliases["latest"]
    assert [change.weights for change in latest.history] == [{"1": 1.0}, {"2": 1.0}]
    assert latest.generation == 3
    deploy(registry, good)
    assert registry.function("acme", "f").aliases["latest"] == latest


def test_qualifiers(registry: Registry, good: tuple[bytes, Path]) -> None:
    deploy(registry, good, alias="prod")
    deploy(registry, variant(good, 9))
    wanted = {None: 2, "latest": 2, "prod": 1, "1": 1, "2": 2}
    assert {qualifier: registry.resolve("acme", "f", qualifier).version for qualifier in wanted} == wanted
    for qualifier in ("3", "0", "01", "nobody", "", "../x", "²"):
        with pytest.raises(NotFound):
            registry.resolve("acme", "f", qualifier)


def test_functions_of_other_tenants_do_not_exist(registry: Registry, good: tuple[bytes, Path]) -> None:
    deploy(registry, good)
    for tenant in ("other", "../acme", "acme/functions", ""):
        for call in (registry.resolve, registry.function, registry.versions, registry.delete_function):
            with pytest.raises(NotFound):
                call(tenant, "f")
    assert registry.functions("other") == ([], None)
    registry.function("acme", "f")


def test_numbers_are_never_used_twice(registry: Registry, good: tuple[bytes, Path]) -> None:
    deploy(registry, good)
    deploy(registry, variant(good, 9))
    registry.delete_function("acme", "f")
    with pytest.raises(NotFound):
        registry.resolve("acme", "f")
    with pytest.raises(NotFound):
        registry.resolve("acme", "f", "1")
    with pytest.raises(NotFound):
        registry.delete_function("acme", "f")
    assert registry.functions("acme") == ([], None)
    again = deploy(registry, good)
    assert (again.version, again.created) == (3, True)
    with pytest.raises(NotFound):
        registry.manifest("acme", "f", 1)


def test_pages_of_functions(registry: Registry, good: tuple[bytes, Path]) -> None:
    names = ["a", "a-b", "b", "b.c", "c0", "d"]
    for name in names:
        deploy(registry, good, name=name)
    registry.delete_function("acme", "b")
    seen: list[str] = []
    after: str | None = ""
    while after is not None:
        records, after = registry.functions("acme", after, limit=2)
        assert len(records) <= 2
        seen += [record.name for record in records]
    assert sorted(seen) == ["a", "a-b", "b.c", "c0", "d"]


def test_a_page_costs_the_same_however_many_were_deleted(registry: Registry, good: tuple[bytes, Path]) -> None:
    store = registry.store
    assert isinstance(store, LocalStore)
    for name in ("a", "m", "z"):
        deploy(registry, good, name=name)
    buried = msgspec.json.encode(FunctionRecord(name="", created=0.0, deleted=True))
    for number in range(2 * MAX_PASSED + 100):
        file = store.root / f"tenants/acme/functions/n{number:04d}/function.json"
        file.parent.mkdir()
        file.write_bytes(buried)
    reads: list[str] = []
    get = store.get
    store.get = lambda key: reads.append(key) or get(key)  # type: ignore[method-assign, func-returns-value]
    pages, seen, after = 0, list[str](), ""
    while after is not None:
        reads.clear()
        records, after = registry.functions("acme", after, limit=20)
        assert len(reads) <= 20 + MAX_PASSED
        pages, seen = pages + 1, [*seen, *(record.name for record in records)]
    assert (pages, seen) == (3, ["a", "m", "z"])
    reads.clear()
    assert [record.name for record in registry.functions("acme", limit=2)[0]] == ["a", "m"]
    assert len(reads) == 2


def test_a_dry_run_writes_nothing(registry: Registry, good: tuple[bytes, Path]) -> None:
    found = registry.check(AdapterUpload(*good), name="f")
    assert (found.version, found.created) == (None, False)
    assert registry.store.list("") == ()
    assert deploy(registry, good).digest == found.digest


@pytest.mark.parametrize(
    "name",
    [
        *("", "../x", "%2e%2e", "a\0b", "a" * 300, "a/b", "A", ".a", "a.", "ä", "a b", "a\n", "-a", "_"),
        "tiny-llama",  # the base model's id
    ],
)
def test_malformed_names_are_refused(registry: Registry, good: tuple[bytes, Path], name: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        registry.deploy("acme", name, AdapterUpload(*good))
    assert raised.value.param == "name"
    for call in (registry.resolve, registry.function, registry.delete_function):
        with pytest.raises(NotFound):
            call("acme", name)
    assert registry.store.list("") == ()


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"alias": "7"}, "alias"),
        ({"alias": "../x"}, "alias"),
        ({"alias": ""}, "alias"),
        ({"policy": {"idle_ttl": 0}}, "policy.idle_ttl"),
        ({"policy": {"provisioned": 1}}, "policy.provisioned"),
        ({"policy": {"timeout": -1}}, "policy.timeout"),
        ({"policy": {"timeout": "5"}}, "policy.timeout"),
        ({"policy": {"defaults": {"temperature": -3}}}, "policy.defaults.temperature"),
        ({"policy": {"defaults": {"tools": []}}}, "policy.defaults"),
    ],
)
def test_malformed_options_are_refused(
    registry: Registry, good: tuple[bytes, Path], options: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as raised:
        deploy(registry, good, **options)
    assert raised.value.param == param
    with pytest.raises(InvalidRequest):
        registry.check(AdapterUpload(*good, **options), name="f")
    assert registry.store.list("") == ()


def test_policies_are_merged(registry: Registry, good: tuple[bytes, Path]) -> None:
    deploy(registry, good, policy={"timeout": 5, "defaults": {"temperature": 0, "stop": "end"}})
    deploy(registry, good)
    deploy(registry, good, policy={"timeout": 6})
    policy = registry.resolve("acme", "f").policy
    assert (policy.timeout, policy.defaults.temperature, policy.defaults.stop) == (6, 0, "end")


def test_a_function_can_not_grow_without_end(
    registry: Registry, good: tuple[bytes, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adapters.functions.MAX_VERSIONS", 2)
    monkeypatch.setattr("adapters.functions.MAX_ALIASES", 3)
    for alpha in (9, 10):
        deploy(registry, variant(good, alpha))
    with pytest.raises(Conflict, match="2 versions"):
        deploy(registry, good)
    for alias in ("a", "b"):
        deploy(registry, variant(good, 9), alias=alias)
    with pytest.raises(Conflict, match="3 aliases"):
        deploy(registry, variant(good, 9), alias="c")
    assert deploy(registry, variant(good, 9)).version == 1


def test_a_refused_adapter_leaves_nothing(registry: Registry, good: tuple[bytes, Path]) -> None:
    with pytest.raises(InvalidAdapter):
        deploy(registry, (changed(good[0], use_dora=True), good[1]))
    assert registry.store.list("") == ()


def test_orphans_of_a_crash_are_skipped(registry: Registry, good: tuple[bytes, Path]) -> None:
    for number in (1, 2):
        registry.store.put_if_absent(f"tenants/acme/functions/f/versions/{number}.json", b"{}")
    assert deploy(registry, good).version == 3
    assert deploy(registry, variant(good, 9)).version == 4


def test_old_orphan_blobs_are_written_anew(registry: Registry, good: tuple[bytes, Path]) -> None:
    deploy(registry, good)
    registry.delete_function("acme", "f")
    store = registry.store
    assert isinstance(store, LocalStore)
    contents = [info.key for prefix in ("blobs/", "artifacts/") for info in store.list(prefix)]
    assert len(contents) == 3
    for hours, anew in ((11, False), (13, True)):
        then = time.time() - hours * 3600
        for key in contents:
            os.utime(store.root / key, (then, then))
        deploy(registry, good, name=f"after-{hours}")
        for key in contents:
            info = store.head(key)
            assert info is not None
            assert (info.modified > then + 3600) == anew


def test_another_base_remakes_the_artifact_or_says_what_does_not_fit(
    registry: Registry, good: tuple[bytes, Path], base: BaseModel
) -> None:
    deploy(registry, good)
    moved = Registry(registry.store, msgspec.structs.replace(base, fingerprint="e" * 64))
    found = moved.resolve("acme", "f")
    assert read_header(registry.store, found.artifact_key).base == "e" * 64
    assert moved.resolve("acme", "f") == found
    assert registry.resolve("acme", "f").artifact_key != found.artifact_key
    wider = tuple((d_in * 2, d_out) for d_in, d_out in base.widths)
    narrow = Registry(registry.store, msgspec.structs.replace(base, fingerprint="d" * 64, widths=wider))
    for _ in range(2):
        with pytest.raises(InvalidAdapter, match="trained for another base model"):
            narrow.resolve("acme", "f")


def test_of_a_split_alias_only_the_version_that_fits_the_base_is_served(
    registry: Registry, good: tuple[bytes, Path], base: BaseModel
) -> None:
    deploy(registry, good)
    record = registry.function("acme", "f")
    elsewhere = VersionEntry(2, "f" * 64, "e" * 64, (4,), ("q",), 10, 0.0, 2)
    manifest = msgspec.structs.replace(registry.manifest("acme", "f", 1), version=2, digest="f" * 64)
    registry.store.put("tenants/acme/functions/f/versions/2.json", msgspec.json.encode(manifest))
    both = with_version(record, elsewhere, "other", 0.0)
    registry.store.put("tenants/acme/functions/f/function.json", msgspec.json.encode(both))
    registry.changes.set_alias("acme", "f", "split", {"1": 0.5, "2": 0.5})
    wider = tuple((d_in * 2, d_out) for d_in, d_out in base.widths)
    narrow = Registry(registry.store, msgspec.structs.replace(base, widths=wider))
    assert [choice.pending for choice in narrow.choices("acme", "f", "split")] == [False, True]
    assert narrow.resolve("acme", "f", "split", point=0.4).version == 1
    with pytest.raises(InvalidAdapter, match="trained for another base model"):
        narrow.resolve("acme", "f", "split", point=0.6)
    assert [choice.refused != () for choice in narrow.choices("acme", "f", "split")] == [False, True]


def test_a_tombstone_keeps_only_what_later_deploys_need(registry: Registry, good: tuple[bytes, Path]) -> None:
    deploy(registry, good, policy={"timeout": 5})
    before = time.time()
    registry.delete_function("acme", "f")
    found = read_record(registry.store, "tenants/acme/functions/f/function.json", FunctionRecord)
    assert found is not None
    tombstone = found[0]
    assert (tombstone.deleted, tombstone.next_version, tombstone.versions, tombstone.aliases) == (True, 2, (), {})
    assert tombstone.policy == Policy()
    assert before - 1 <= tombstone.removed["1"] <= time.time()
    for change in (
        lambda: registry.changes.set_alias("acme", "f", "prod", {"1": 1.0}),
        lambda: registry.changes.roll_back("acme", "f"),
        lambda: registry.changes.set_policy("acme", "f", {}),
        lambda: registry.delete_version("acme", "f", 1),
    ):
        with pytest.raises(NotFound):
            change()


def test_a_damaged_record_is_an_outage_not_a_crash(registry: Registry, good: tuple[bytes, Path]) -> None:
    deploy(registry, good)
    registry.store.put("tenants/acme/functions/f/function.json", b"{")
    with pytest.raises(StoreUnavailable, match="the record of function f is damaged"):
        registry.resolve("acme", "f")


def test_what_is_staged_keeps_its_number_and_is_listed_by_its_deploy(
    registry: Registry, good: tuple[bytes, Path]
) -> None:
    staged = registry.stage("acme", "f", AdapterUpload(*good))
    made = staged.deployment
    assert registry.store.head(artifact_key(registry.base.fingerprint, made.digest)) is not None
    with pytest.raises(NotFound):
        registry.resolve("acme", "f", str(made.version))
    deploy(registry, variant(good, 99))  # another one is faster
    done = deploy(registry, good, staged=staged)
    assert (done.version, done.digest, done.created) == (made.version, made.digest, True)
    assert [entry.version for entry in registry.function("acme", "f").versions] == [1, 2]
    assert registry.resolve("acme", "f").digest == done.digest
    again = registry.stage("acme", "f", AdapterUpload(*good))
    assert (again.deployment.version, again.deployment.created, again.manifest) == (1, False, None)
    assert not deploy(registry, good, staged=again).created


def test_what_was_staged_and_collected_is_stored_again(registry: Registry, good: tuple[bytes, Path]) -> None:
    staged = registry.stage("acme", "f", AdapterUpload(*good))
    artifact = artifact_key(registry.base.fingerprint, staged.deployment.digest)
    for key in (artifact, "tenants/acme/functions/f/versions/1.json"):
        assert registry.store.head(key) is not None
        registry.store.delete(key)
    done = deploy(registry, good, staged=staged)
    assert registry.manifest("acme", "f", done.version or 0).digest == staged.deployment.digest
    assert registry.store.head(artifact) is not None
