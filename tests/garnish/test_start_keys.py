"""Starts whose registry persists while their state does not: keys stay few, and those of users stay."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from adapters import tenants as tenant_records
from adapters.errors import Conflict, NotFound
from adapters.keys import KeyRecord, new_key
from adapters.local_store import LocalStore
from adapters.records import read_record, update_record
from adapters.slo import Slo
from adapters.tenants import ADMIN_KEY, FILE_BYTES, MAX_KEYS, Admin, Limits, Tenant, Tenants, tenant_key
from garnish.config import ServiceFile, load_service_file
from garnish.credentials import Credentials
from garnish.errors import StartError
from garnish.up.prepare import make_keys

URL = "http://127.0.0.1:8080"
KEPT = 10
"""Keys of starts that are kept here."""


@pytest.fixture(autouse=True)
def few_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer starts than in earnest fill the room for their keys."""
    assert KEPT < tenant_records.MAX_START_KEYS < MAX_KEYS / 2
    monkeypatch.setattr(tenant_records, "MAX_START_KEYS", KEPT)


def service(folder: Path, text: str = "") -> ServiceFile:
    file = folder / "serverless.yml"
    file.write_text(f"service: s\nbase_model: m\nregistry: ./registry\ntenants: {{a: , b: }}\n{text}")
    return load_service_file(file, {})


def start(folder: Path, number: int, text: str = "") -> tuple[Credentials, dict[str, str]]:
    """A start with a state directory of its own."""
    state = folder / f"state-{number}"
    state.mkdir(exist_ok=True)
    return make_keys(service(folder, text), state, URL)


@pytest.fixture
def tenants(tmp_path: Path) -> Tenants:
    return Tenants(LocalStore(tmp_path / "registry"))


def admin_keys(tenants: Tenants) -> tuple[KeyRecord, ...]:
    found = read_record(tenants.store, ADMIN_KEY, Admin)
    assert found is not None
    return found[0].keys


def test_starts_without_state_keep_keys_few(tmp_path: Path, tenants: Tenants) -> None:
    tenants.put("a")
    users = [tenants.add_key("a")[0] for _ in range(3)]
    first, _ = start(tmp_path, 0)
    for number in range(1, KEPT + 5):
        last, made = start(tmp_path, number)
        assert list(made) == ["admin", "tenant a", "tenant b"]
    assert len(admin_keys(tenants)) <= KEPT + 1
    assert len(tenants.get("a").keys) <= KEPT + 1 + len(users)
    for key in (*users, first.admin_key, first.api_key, last.admin_key, *last.keys.values()):
        assert tenants.verify(key) is not None
    assert start(tmp_path, KEPT + 4)[1] == {}, "a state that is still there has its keys"


def test_a_tenant_full_of_its_own_keys_starts(tmp_path: Path, tenants: Tenants) -> None:
    keys = tuple(new_key("a")[1] for _ in range(MAX_KEYS))
    tenants.put("a")
    update_record(tenants.store, tenant_key("a"), Tenant, lambda _: Tenant(id="a", keys=keys))
    credentials, _ = start(tmp_path, 0)
    assert tenants.verify(credentials.keys["a"]) is not None
    assert {key.key_id for key in keys} <= {key.key_id for key in tenants.get("a").keys}


def operators_file(folder: Path, text: str) -> str:
    file = folder / "keys.toml"
    file.write_text(text)
    file.chmod(0o600)
    return "gateway: {credentials_file: ./keys.toml}\n"


def test_keys_from_the_operators_file(tmp_path: Path, tenants: Tenants) -> None:
    admin, key = new_key(None)[0], new_key("a")[0]
    named = operators_file(tmp_path, f'admin_key = "{admin}"\n[keys]\na = "{key}"\n')
    made = [start(tmp_path, number, named) for number in range(3)]
    assert [list(new) for _, new in made] == [["tenant b"]] * 3, "who is not in the file has a key made"
    assert {(found.admin_key, found.api_key) for found, _ in made} == {(admin, key)}
    assert tenants.verify(key) is not None
    assert len(admin_keys(tenants)) == len(tenants.get("a").keys) == 1


def test_credentials_of_a_first_start_serve_as_that_file(tmp_path: Path, tenants: Tenants) -> None:
    start(tmp_path, 0)
    named = operators_file(tmp_path, (tmp_path / "state-0" / "credentials.toml").read_text())
    for number in range(1, KEPT + 5):
        start(tmp_path, -number)
    first, made = start(tmp_path, 1, named)
    assert made == {}
    for number in range(KEPT + 5):
        start(tmp_path, -100 - number)
    assert tenants.verify(first.admin_key) is not None


def test_a_revoked_key_of_that_file_stays_revoked(tmp_path: Path, tenants: Tenants) -> None:
    key = new_key("a")[0]
    named = operators_file(tmp_path, f'keys = {{a = "{key}"}}\n')
    start(tmp_path, 0, named)
    owner = tenants.verify(key)
    assert owner is not None
    tenants.revoke_key("a", owner.key_id)
    credentials, made = start(tmp_path, 1, named)
    assert "tenant a" in made
    assert tenants.verify(key) is None
    assert tenants.verify(credentials.keys["a"]) is not None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("admin_key = 'gak_1'", "admin_key is not a key of the form gak_"),
        (f"keys = {{a = '{new_key('b')[0]}'}}", "keys.a is not a key of the form gsk_a_"),
        (f"admin_key = '{new_key('b')[0]}'", "admin_key is not a key"),
        ("keys = ", "not readable credentials"),
    ],
    ids=["a short key", "another tenant's key", "a tenant's key for the admin's", "no TOML"],
)
def test_a_file_that_can_not_be_used(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(StartError, match=told):
        start(tmp_path, 0, operators_file(tmp_path, text))


def test_a_file_that_others_can_read_or_nobody(tmp_path: Path) -> None:
    named = operators_file(tmp_path, "")
    (tmp_path / "keys.toml").chmod(0o644)
    with pytest.raises(StartError, match="readable by others"):
        start(tmp_path, 0, named)
    (tmp_path / "keys.toml").unlink()
    with pytest.raises(StartError, match="credentials_file"):
        start(tmp_path, 0, named)


def declared(folder: Path, text: str) -> ServiceFile:
    file = folder / "serverless.yml"
    file.write_text(f"service: s\nbase_model: m\nregistry: ./registry\n{text}")
    return load_service_file(file, {})


def test_the_file_decides(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    make_keys(
        declared(
            tmp_path,
            "tenants: {a: {limits: {adapters: 5}, weight: 2, slo: {class: strict}, webhook_hosts: [a.example]}, "
            "b: {limits: {bytes: 1KiB}, file_bytes: 2KiB}}\n",
        ),
        state,
        URL,
    )
    tenants = Tenants(LocalStore(tmp_path / "registry"))
    assert (tenants.get("a").limits, tenants.get("b").limits) == (Limits(adapters=5), Limits(bytes=1024))
    assert (tenants.get("a").slo, tenants.get("a").weight) == (Slo(slo_class="strict"), 2.0)
    assert (tenants.get("a").webhook_hosts, tenants.get("b").webhook_hosts) == (("a.example",), ())
    assert (tenants.get("a").file_bytes, tenants.get("b").file_bytes) == (FILE_BYTES, 2048)
    for name in ("a", "b"):
        with pytest.raises(Conflict):
            tenants.replace(name, Limits())
    credentials, made = make_keys(declared(tmp_path, "tenants: {a: {}}\n"), state, URL)
    assert (made, list(credentials.keys)) == ({}, ["a"])
    assert tenants.get("a").limits == Limits()
    assert (tenants.get("a").slo, tenants.get("a").weight, tenants.get("a").webhook_hosts) == (Slo(), 1.0, ())
    assert not tenants.get("b").declared
    assert tenants.get("b").limits == Limits(bytes=1024), "what is no longer declared stays as it was"
    tenants.delete("b")


def test_another_registry(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    make_keys(declared(tmp_path, "tenants: {a: , b: }\n"), state, URL)
    make_keys(msgspec.structs.replace(declared(tmp_path, "tenants: {a: }\n"), registry="./elsewhere"), state, URL)
    tenants = Tenants(LocalStore(tmp_path / "elsewhere"))
    assert [tenant.id for tenant in tenants.list()] == ["a"]
    with pytest.raises(NotFound):
        tenants.get("b")


def test_without_keys(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    make_keys(declared(tmp_path, "auth: none\ntenants: {a: {limits: {concurrent: 2}}}\n"), state, URL)
    tenants = Tenants(LocalStore(tmp_path / "registry"))
    assert [(tenant.id, tenant.limits.concurrent) for tenant in tenants.list()] == [("a", 2), ("default", None)]
