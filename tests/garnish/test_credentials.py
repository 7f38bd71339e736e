"""Keys that the first start makes and later ones keep, over a real registry."""

from __future__ import annotations

import stat
import tomllib
from pathlib import Path

import pytest

from adapters.local_store import LocalStore
from adapters.tenants import Tenants
from garnish.credentials import Credentials, prepare_keys, read_credentials, write_credentials
from garnish.errors import StartError

URL = "http://127.0.0.1:8080"


def test_first_start_makes_keys_that_work(tmp_path: Path) -> None:
    tenants = Tenants(LocalStore(tmp_path))
    credentials, made = prepare_keys(tenants, ("acme", "globex"), None, URL)
    assert made == {
        "admin": credentials.admin_key,
        "tenant acme": credentials.keys["acme"],
        "tenant globex": credentials.keys["globex"],
    }
    assert (credentials.tenant, credentials.api_key) == ("acme", credentials.keys["acme"])
    owners = [tenants.verify(key) for key in (credentials.admin_key, *credentials.keys.values())]
    assert [owner and owner.tenant for owner in owners] == [None, "acme", "globex"]
    assert None not in owners


def test_later_starts_make_keys_only_for_who_has_none(tmp_path: Path) -> None:
    tenants = Tenants(LocalStore(tmp_path))
    first, _ = prepare_keys(tenants, ("acme",), None, URL)
    second, made = prepare_keys(tenants, ("acme", "globex"), first, URL)
    assert list(made) == ["tenant globex"]
    assert (second.admin_key, second.keys["acme"]) == (first.admin_key, first.keys["acme"])


def test_keys_of_another_registry_are_replaced(tmp_path: Path) -> None:
    old, _ = prepare_keys(Tenants(LocalStore(tmp_path / "old")), ("acme",), None, URL)
    tenants = Tenants(LocalStore(tmp_path / "new"))
    new, made = prepare_keys(tenants, ("acme",), old, URL)
    assert list(made) == ["admin", "tenant acme"]
    assert tenants.verify(new.api_key) is not None
    assert tenants.verify(old.api_key) is None


def test_revoked_key_is_replaced(tmp_path: Path) -> None:
    tenants = Tenants(LocalStore(tmp_path))
    first, _ = prepare_keys(tenants, ("acme",), None, URL)
    owner = tenants.verify(first.api_key)
    assert owner is not None
    tenants.revoke_key("acme", owner.key_id)
    assert list(prepare_keys(tenants, ("acme",), first, URL)[1]) == ["tenant acme"]


def test_file_is_private_and_read_back(tmp_path: Path) -> None:
    file = tmp_path / "credentials.toml"
    credentials = Credentials(
        url=URL, admin_key="gak_1", tenant="a.b", api_key="gsk_1", keys={"a.b": "gsk_1", "c": "x"}
    )
    write_credentials(file, credentials)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert read_credentials(file) == credentials
    assert tomllib.loads(file.read_text())["keys"] == credentials.keys
    assert list(tmp_path.iterdir()) == [file]


def test_absent_and_broken_files(tmp_path: Path) -> None:
    file = tmp_path / "credentials.toml"
    assert read_credentials(file) is None
    for broken in ("url = ", "url = 5\ntenant = 'x'", "tenant = 'x'"):
        file.write_text(broken)
        with pytest.raises(StartError, match="delete the file"):
            read_credentials(file)
