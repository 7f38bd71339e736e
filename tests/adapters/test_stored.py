"""Records that a newer release has stored are read without what is new in them, and written with it; requests stay
strict."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from peft_files import variant

from adapters.aliases import Alias
from adapters.deployment import AdapterUpload
from adapters.functions import Defaults, FunctionRecord, Policy, VersionEntry
from adapters.local_store import LocalStore
from adapters.records import decode_record, encode_over
from adapters.registry import Registry
from adapters.slo import Slo
from adapters.standing import function_key
from adapters.tenants import Limits, Tenant, Tenants

FUNCTION = FunctionRecord(
    "tales",
    created=1.0,
    policy=Policy(timeout=3.0, defaults=Defaults(max_tokens=7), slo_class="standard"),
    versions=(
        VersionEntry(1, "d" * 64, "b", (8,), ("q",), 10, 1.0, 2),
        VersionEntry(2, "e" * 64, "b", (4,), (), 8, 2.0, 4),
    ),
    aliases={"prod": Alias({"1": 1.0}, generation=1, when=1.0)},
)
TENANT = Tenant("acme", slo=Slo(ttft_ms=200.0), limits=Limits(rps=3.0))


def places(value: Any) -> list[dict[str, Any]]:
    """Every object in it that stands for a struct."""
    if isinstance(value, list):
        return [place for each in value for place in places(each)]
    if not isinstance(value, dict):
        return []
    found = [value]
    for name, each in value.items():
        if name in ("removed", "reserved", "weights", "templates"):
            continue
        found += places(list(each.values()) if name == "aliases" else each)
    return found


@pytest.mark.parametrize("record", [FUNCTION, TENANT])
@given(data=st.data())
def test_fields_of_a_newer_release_are_left_out_wherever_they_are(record: Any, data: st.DataObject) -> None:
    told = msgspec.json.decode(msgspec.json.encode(record))
    every = places(told)
    assert len(every) > 2
    for place in data.draw(st.lists(st.sampled_from(every), min_size=1, max_size=3)):
        place["from_a_newer_release"] = data.draw(st.sampled_from([1, None, "x", {"a": [1]}, [{"b": 2}]]))
    assert decode_record(msgspec.json.encode(told), type(record)) == record


def test_what_is_wrong_otherwise_is_still_refused() -> None:
    told = msgspec.json.decode(msgspec.json.encode(FUNCTION)) | {"new": 1, "generation": "many"}
    with pytest.raises(msgspec.ValidationError, match="generation"):
        decode_record(msgspec.json.encode(told), FunctionRecord)
    with pytest.raises(msgspec.DecodeError):
        decode_record(b"{", FunctionRecord)


def test_an_older_release_serves_and_changes_what_a_newer_one_has_stored(tmp_path: Path) -> None:
    tenants = Tenants(LocalStore(tmp_path))
    tenants.put("acme", limits=Limits(rps=3.0))
    (file,) = tmp_path.rglob("tenant.json")
    told = msgspec.json.decode(file.read_bytes())
    told["limits"]["gpus"] = 4
    file.write_bytes(msgspec.json.encode(told))
    assert tenants.get("acme").limits == Limits(rps=3.0)
    key, _ = tenants.add_key("acme")
    assert tenants.verify(key)


NEWER = {"device_class": "h200", "mirrors": [{"region": "eu"}], "off": None, "warm_up": {"prompts": ["x"]}}
"""Policy fields of a release to come."""


@pytest.mark.parametrize(
    "write",
    [
        lambda registry, _: registry.changes.set_policy("acme", "f", {"timeout": 5}),
        lambda registry, _: registry.changes.set_policy("acme", "f", {"timeout": None, "defaults": {"top_k": 3}}),
        lambda registry, _: registry.changes.set_alias("acme", "f", "prod", {"1": 1.0}),
        lambda registry, _: registry.changes.roll_back("acme", "f", "prod"),
        lambda registry, good: registry.deploy(
            "acme", "f", AdapterUpload(*good, alias="next", policy={"max_concurrency": 3})
        ),
    ],
    ids=["policy", "policy-back", "alias", "rollback", "deploy"],
)
def test_a_policy_of_a_newer_release_survives_our_writes(
    registry: Registry, good: tuple[bytes, Path], write: Callable[[Registry, Any], object]
) -> None:
    registry.deploy("acme", "f", AdapterUpload(*good, policy={"timeout": 9, "defaults": {"top_k": 2}}))
    registry.deploy("acme", "f", AdapterUpload(*variant(good, 3)))
    registry.changes.set_alias("acme", "f", "prod", {"1": 1.0})
    registry.changes.set_alias("acme", "f", "prod", {"2": 1.0})
    key = function_key("acme", "f")
    stored = msgspec.json.decode(registry.store.get(key).data)
    stored["policy"] |= NEWER
    stored["policy"]["defaults"]["chat_template"] = "x"
    stored["owner"] = {"team": "a"}
    stored["aliases"]["latest"]["note"] = "keep"
    registry.store.put(key, msgspec.json.encode(stored))
    before = registry.function("acme", "f")
    write(registry, good)
    after, known = msgspec.json.decode(registry.store.get(key).data), registry.function("acme", "f")
    assert known.generation == before.generation + 1
    assert {name: after["policy"].get(name) for name in NEWER} == NEWER
    assert after["owner"] == {"team": "a"}
    same = before.policy.defaults == known.policy.defaults
    assert after["policy"].get("defaults", {}).get("chat_template") == ("x" if same else None), "a value as a whole"
    if before.aliases["latest"] == known.aliases["latest"]:
        assert after["aliases"]["latest"]["note"] == "keep"
    assert decode_record(msgspec.json.encode(after), FunctionRecord) == known


def test_a_deleted_function_leaves_nothing_for_who_takes_its_name(registry: Registry, good: tuple[bytes, Path]) -> None:
    registry.deploy("acme", "f", AdapterUpload(*good))
    key = function_key("acme", "f")
    stored = msgspec.json.decode(registry.store.get(key).data)
    stored["policy"] = NEWER
    registry.store.put(key, msgspec.json.encode(stored))
    registry.delete_function("acme", "f")
    assert not set(NEWER) & set(msgspec.json.decode(registry.store.get(key).data)["policy"])
    registry.deploy("acme", "f", AdapterUpload(*good))
    assert msgspec.json.decode(registry.store.get(key).data)["policy"] == {}


@given(data=st.data())
def test_what_was_not_changed_is_written_as_it_was_stored(data: st.DataObject) -> None:
    """Over records with unknown fields anywhere: a change of one known field changes nothing else."""
    stored = msgspec.json.decode(msgspec.json.encode(FUNCTION))
    for place in data.draw(st.lists(st.sampled_from(places(stored)), min_size=1, max_size=3)):
        place["from_a_newer_release"] = data.draw(st.sampled_from([1, None, {"a": [1]}]))
    change = data.draw(st.sampled_from([{"created": 2.0}, {"generation": 5}, {"removed": {"1": 3.0}}]))
    new = msgspec.structs.replace(FUNCTION, **change)
    assert msgspec.json.decode(encode_over(msgspec.json.encode(stored), FUNCTION, new)) == stored | change
