"""Records that a newer release has stored are read without what is new in them; requests stay strict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.aliases import Alias
from adapters.functions import Defaults, FunctionRecord, Policy, VersionEntry
from adapters.local_store import LocalStore
from adapters.slo import Slo
from adapters.stored import decode_record
from adapters.tenants import Limits, Tenant, Tenants

FUNCTION = FunctionRecord(
    "tales",
    created=1.0,
    policy=Policy(timeout=3.0, defaults=Defaults(max_tokens=7), slo_class="standard"),
    versions=(VersionEntry(1, "d" * 64, "b", (8,), ("q",), 10, 1.0), VersionEntry(2, "e" * 64, "b", (4,), (), 9, 2.0)),
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
        if name in ("removed", "weights"):
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
