"""Where the client looks for the service and its key."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from garnish.connection import DEFAULT_URL, Connection, find_connection
from garnish.credentials import Credentials, write_credentials

LOCAL = "http://127.0.0.1:9999"


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
