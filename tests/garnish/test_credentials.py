"""Keys that the first start makes and later ones keep, over a real registry."""

from __future__ import annotations

import stat
import tomllib
from pathlib import Path

import msgspec
import pytest

from adapters.local_store import LocalStore
from adapters.tenants import Tenants
from garnish.credentials import (
    DEFAULT_URL,
    Connection,
    Credentials,
    find_connection,
    prepare_keys,
    read_credentials,
    write_credentials,
)
from garnish.errors import StartError

URL = "http://127.0.0.1:8080"
LOCAL = "http://127.0.0.1:9999"


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


@pytest.fixture
def state(tmp_path: Path) -> Path:
    write_credentials(
        tmp_path / "credentials.toml",
        Credentials(url=LOCAL, admin_key="admin", tenant="a", api_key="key-a", keys={"a": "key-a", "b": "key-b"}),
    )
    return tmp_path


def find(state: Path, *given: str | None, tenant: str | None = None, **environment: str) -> Connection:
    url, key = (*given, None, None)[:2]
    environment.setdefault("XDG_CONFIG_HOME", str(state / "no-such-config"))
    found = find_connection(url, key, environment, state=state, tenant=tenant)
    return msgspec.structs.replace(found, key_from="")


def test_where_a_key_was_found(state: Path, tmp_path: Path) -> None:
    (tmp_path / "garnish").mkdir()
    (tmp_path / "garnish" / "config.toml").write_text('url = "http://far"\napi_key = "far-key"\n')
    known = {"XDG_CONFIG_HOME": str(tmp_path)}
    for url, key, environment, source in (
        (None, None, {}, str(state / "credentials.toml")),
        (None, "k", {}, "given"),
        (None, None, {"GARNISH_API_KEY": "k"}, "GARNISH_API_KEY"),
        ("http://far", None, {}, str(tmp_path / "garnish" / "config.toml")),
    ):
        assert find_connection(url, key, {**known, **environment}, state=state).key_from == source


def test_credentials_of_the_state(state: Path) -> None:
    assert find(state) == Connection(LOCAL, "key-a")
    assert find(state, tenant="b") == Connection(LOCAL, "key-b", "b")
    assert find(state, tenant="not-declared") == Connection(LOCAL, "admin", "not-declared")


def test_arguments_win_over_environment_over_files(state: Path) -> None:
    environment = {"GARNISH_URL": "http://env", "GARNISH_API_KEY": "env-key"}
    assert find(state, "http://given", "given-key", **environment) == Connection("http://given", "given-key")
    assert find(state, **environment) == Connection("http://env", "env-key")
    assert find(state, GARNISH_API_KEY="env-key") == Connection(LOCAL, "env-key")


def test_a_key_goes_only_to_its_own_service(state: Path) -> None:
    assert find(state, "http://elsewhere") == Connection("http://elsewhere", "")
    assert find(state, LOCAL + "/") == Connection(LOCAL, "key-a")


def test_user_config_is_the_last_resort(tmp_path: Path, state: Path) -> None:
    (tmp_path / "config" / "garnish").mkdir(parents=True)
    (tmp_path / "config" / "garnish" / "config.toml").write_text('url = "http://far"\napi_key = "far-key"\n')
    environment = {"XDG_CONFIG_HOME": str(tmp_path / "config")}
    assert find(tmp_path / "nothing", **environment) == Connection("http://far", "far-key")
    assert find(tmp_path / "nothing", "http://other", **environment) == Connection("http://other", "")
    assert find(state, **environment) == Connection(LOCAL, "key-a")


def test_nothing_known(tmp_path: Path) -> None:
    assert find(tmp_path / "nothing") == Connection(DEFAULT_URL, "")
