from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.errors import Conflict, InvalidRequest, NotFound
from adapters.keys import Principal, new_key, parse_key
from adapters.names import NAME
from adapters.slo import Slo
from adapters.store import ObjectStore
from adapters.tenants import Limits, Tenant, Tenants


@pytest.fixture
def tenants(store: ObjectStore) -> Tenants:
    return Tenants(store)


@given(st.none() | st.from_regex(NAME, fullmatch=True))
def test_keys_name_their_owner(tenant: str | None) -> None:
    text, record = new_key(tenant)
    assert text.startswith("gak_" if tenant is None else f"gsk_{tenant}_")
    assert parse_key(text) == Principal(tenant=tenant, key_id=record.key_id)


@given(st.text() | st.from_regex(r"g[sa]k_[a-z_]*_[0-9a-f]*_?[0-9a-f]*"))
def test_other_texts_are_no_keys(text: str) -> None:
    claim = parse_key(text)
    assert claim is None or len(text.rsplit("_", 1)[1]) == 64


def test_a_key_opens_its_tenant_until_it_is_revoked(tenants: Tenants, store: ObjectStore) -> None:
    tenants.put("acme_x")
    tenants.put("other")
    text, record = tenants.add_key("acme_x")
    second, _ = tenants.add_key("acme_x")
    assert tenants.verify(text) == Principal("acme_x", record.key_id)
    assert tenants.verify(text.replace("acme_x", "other")) is None
    assert tenants.verify(text.replace("gsk_acme_x", "gak")) is None
    assert tenants.verify(text[:-1] + ("0" if text[-1] != "0" else "1")) is None
    assert tenants.verify(text.upper()) is None
    tenants.revoke_key("acme_x", record.key_id)
    tenants.revoke_key("acme_x", record.key_id)
    assert tenants.verify(text) is None
    assert tenants.verify(second) is not None
    with pytest.raises(NotFound):
        tenants.revoke_key("acme_x", "000000000000")


def test_admin_keys_are_apart(tenants: Tenants) -> None:
    text, record = tenants.add_key(None, "start")
    assert tenants.verify(text) == Principal(None, record.key_id)
    assert tenants.verify(text[:-1] + ("0" if text[-1] != "0" else "1")) is None
    tenants.revoke_key(None, record.key_id)
    assert tenants.verify(text) is None


ZEROS = "0" * 12 + "_" + "0" * 64


@pytest.mark.parametrize(
    "text",
    [
        *("", "gsk", "gak__", "\ud800", "\0", "x" * 100_000),
        *(f"gsk_../x_{ZEROS}", f"gsk_nobody_{ZEROS}", f"gak_{ZEROS}", f"gsk_a_{'٠' * 12}_{'0' * 64}"),
    ],
)
def test_nonsense_opens_nothing(tenants: Tenants, text: str) -> None:
    assert tenants.verify(text) is None


def test_only_hashes_are_stored(tenants: Tenants, store: ObjectStore) -> None:
    tenants.put("acme")
    secrets = [text.rsplit("_", 1)[1] for text, _ in (tenants.add_key("acme"), tenants.add_key(None, "start"))]
    stored = b"".join(store.get(info.key).data for info in store.list(""))
    assert all(secret.encode() not in stored for secret in secrets)


def test_changes_keep_what_they_do_not_name(tenants: Tenants, store: ObjectStore) -> None:
    tenants.put("acme", weight=2.0, slo=Slo(ttft_ms=500, slo_class="strict"), limits=Limits(rps=5), declared=True)
    text, _ = tenants.add_key("acme")
    tenants.put("acme", weight=3.0)
    found = tenants.get("acme")
    assert (found.weight, found.slo.ttft_ms, found.limits.rps, found.declared) == (3.0, 500, 5, True)
    assert tenants.verify(text) is not None
    assert json.loads(store.get("tenants/acme/tenant.json").data)["slo"]["class"] == "strict"
    assert [tenant.id for tenant in tenants.list()] == ["acme"]


@pytest.mark.parametrize("name", ["", "../x", "A", "a" * 65, "a/b", "a\0", ".tmp", "-a"])
def test_malformed_names(tenants: Tenants, name: str) -> None:
    with pytest.raises(InvalidRequest):
        tenants.put(name)
    for call in (tenants.get, tenants.add_key):
        with pytest.raises(NotFound):
            call(name)


@pytest.mark.parametrize(
    "values",
    [
        *({"weight": 0.0}, {"weight": float("nan")}, {"weight": float("inf")}, {"slo": Slo(attain=2)}),
        *({"slo": Slo(ttft_ms=-1)}, {"limits": Limits(concurrent=0)}),
    ],
)
def test_values_out_of_range_never_reach_the_store(tenants: Tenants, values: dict[str, Any]) -> None:
    tenants.put("acme", weight=2.0)
    with pytest.raises(InvalidRequest):
        tenants.put("acme", **values)
    assert tenants.get("acme") == Tenant(id="acme", weight=2.0)


def test_unknown_tenants(tenants: Tenants) -> None:
    with pytest.raises(NotFound):
        tenants.get("nobody")
    with pytest.raises(NotFound):
        tenants.add_key("nobody")


def test_no_key_is_lost_in_a_race(tenants: Tenants, store: ObjectStore) -> None:
    tenants.put("acme")
    with ThreadPoolExecutor(8) as pool:
        texts = [text for text, _ in pool.map(lambda _: Tenants(store).add_key("acme"), range(16))]
    assert all(tenants.verify(text) for text in texts)


def test_keys_that_were_revoked_first_make_room(tenants: Tenants, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a tenant that changes its keys now and then would one day get none any more."""
    monkeypatch.setattr("adapters.tenants.MAX_KEYS", 3)
    tenants.put("acme")
    made = [tenants.add_key("acme") for _ in range(3)]
    with pytest.raises(Conflict, match="revoke"):
        tenants.add_key("acme")
    for _, record in (made[1], made[0]):
        tenants.revoke_key("acme", record.key_id)
    made += [tenants.add_key("acme") for _ in range(2)]
    assert [tenants.verify(text) is not None for text, _ in made] == [False, False, True, True, True]
    assert [key.key_id for key in tenants.get("acme").keys] == [record.key_id for _, record in made[2:]]
    with pytest.raises(NotFound):
        tenants.revoke_key("acme", made[0][1].key_id)
