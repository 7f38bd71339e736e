"""Where the service is and which key to send: arguments, environment, then the files that the command line leaves."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from garnish.credentials import FILE_NAME, Credentials, read_credentials
from garnish.errors import StartError

DEFAULT_URL = "http://127.0.0.1:8080"
DEFAULT_STATE = Path(".garnish")


class Connection(msgspec.Struct, frozen=True):
    url: str
    key: str
    """Empty: none is sent (a service with `auth: none`)."""
    tenant: str | None = None
    """Named in a header; needed with an admin key."""
    key_from: str = ""
    """Where the key was found, for whoever wonders which one was refused."""


class _UserConfig(msgspec.Struct, frozen=True):
    """The content of ~/.config/garnish/config.toml."""

    url: str | None = None
    api_key: str | None = None


def find_connection(
    url: str | None,
    key: str | None,
    environment: Mapping[str, str],
    *,
    state: Path = DEFAULT_STATE,
    tenant: str | None = None,
    admin: bool = False,
) -> Connection:
    """Returns the URL of the service and the key to send. Arguments win, then GARNISH_URL and GARNISH_API_KEY, then the
    state's credentials, then the user's config.toml, then DEFAULT_URL without a key.

    A key from a file is sent only to the URL that the same file names, lest one service learns the key of another.
    Raises StartError when a file is there but can't be read.
    """
    url = url or environment.get("GARNISH_URL")
    key, source = (key, "given") if key else (environment.get("GARNISH_API_KEY"), "GARNISH_API_KEY")
    credentials = read_credentials(state / FILE_NAME)
    if credentials is not None and (url is None or _same(url, credentials.url)):
        if key is None:
            key, source = _key(credentials, tenant, admin), str(state / FILE_NAME)
        return Connection(credentials.url, key, tenant, source)
    config = _read_user_config(environment)
    if config.url is not None and (url is None or _same(url, config.url)):
        if key is None:
            key, source = config.api_key or "", str(_user_file(environment))
        return Connection(config.url, key, tenant, source)
    return Connection(url or config.url or DEFAULT_URL, key or "", tenant, source)


def _key(credentials: Credentials, tenant: str | None, admin: bool) -> str:
    if admin:
        return credentials.admin_key
    return credentials.keys.get(tenant, credentials.admin_key) if tenant else credentials.api_key


def _same(one: str, other: str) -> bool:
    return one.rstrip("/") == other.rstrip("/")


def _user_file(environment: Mapping[str, str]) -> Path:
    folder = environment.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(folder) / "garnish" / "config.toml"


def _read_user_config(environment: Mapping[str, str]) -> _UserConfig:
    file = _user_file(environment)
    try:
        return msgspec.convert(tomllib.loads(file.read_text()), _UserConfig)
    except FileNotFoundError:
        return _UserConfig()
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise StartError(f"{file}: {error}") from None
