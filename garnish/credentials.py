"""Finds the service's URL and key in arguments, the environment or files; writes the credentials file.

The file is `<state>/credentials.toml` (mode 0600).
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from adapters.keys import parse_key
from adapters.tenants import Tenants
from garnish.errors import StartError
from infra.text import write_atomically

FILE_NAME = "credentials.toml"
DEFAULT_URL = "http://127.0.0.1:8080"
DEFAULT_STATE = Path(".garnish")


class Credentials(msgspec.Struct, frozen=True, kw_only=True):
    """Content of credentials.toml: the service's URL and keys. With `auth: none` the keys are empty."""

    url: str
    admin_key: str = ""
    tenant: str
    api_key: str = ""
    keys: dict[str, str] = {}


class OperatorKeys(msgspec.Struct, frozen=True, kw_only=True):
    """Content of the operator's key file, which may be a copy of credentials.toml.

    It is kept outside the state directory, so it remains if the state directory is deleted.
    """

    admin_key: str = ""
    keys: dict[str, str] = {}


def read_credentials(file: Path) -> Credentials | None:
    """Returns the file's credentials, or None if the file does not exist. Raises StartError if it can't be used."""
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8-sig"))
        return msgspec.convert(data, Credentials)
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise StartError(
            f"{file}: not readable credentials ({error}); delete the file to have new keys created"
        ) from None


def write_credentials(file: Path, credentials: Credentials) -> None:
    """Writes the credentials to the file atomically, so that a reader never sees a part of them."""
    lines = [
        f"{name} = {json.dumps(getattr(credentials, name))}"
        for name in ("url", "admin_key", "tenant", "api_key")
        if getattr(credentials, name)
    ]
    lines += ["", "[keys]", *(f"{json.dumps(tenant)} = {json.dumps(key)}" for tenant, key in credentials.keys.items())]
    write_atomically(file, "\n".join(lines) + "\n")


def read_operator_keys(file: Path) -> OperatorKeys:
    """Returns the operator's keys. Raises StartError if the file is missing, readable by others, or has a bad key."""
    where = f"gateway.credentials_file: {file}"
    try:
        mode = file.stat().st_mode & 0o777
        chosen = msgspec.convert(tomllib.loads(file.read_text(encoding="utf-8-sig")), OperatorKeys)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise StartError(f"{where}: not readable credentials ({error})") from None
    if mode & 0o077:
        raise StartError(f"{where} is readable by others (mode {mode:o}); run: chmod 600 {file}")
    for owner, key in ((None, chosen.admin_key), *chosen.keys.items()):
        claim = parse_key(key)
        if key and (claim is None or claim.tenant != owner):
            field, form = ("admin_key", "gak_…") if owner is None else (f"keys.{owner}", f"gsk_{owner}_…")
            raise StartError(f"{where}: {field} is not a key of the form {form} (docs/guide/tenants.md shows it)")
    return chosen


def adopt_keys(
    tenants: Tenants, names: Sequence[str], chosen: OperatorKeys, existing: Credentials | None
) -> Credentials:
    """Registers the operator's keys of the tenants `names`; returns `existing` with these keys added."""
    keys = {name: chosen.keys[name] for name in names if chosen.keys.get(name)}
    for key in filter(None, (chosen.admin_key, *keys.values())):
        tenants.adopt_key(key)
    existing = existing or Credentials(url="", tenant=names[0])
    return msgspec.structs.replace(
        existing, admin_key=chosen.admin_key or existing.admin_key, keys={**existing.keys, **keys}
    )


def prepare_keys(
    tenants: Tenants, names: Sequence[str], existing: Credentials | None, url: str
) -> tuple[Credentials, dict[str, str]]:
    """Creates the tenants `names`, and a key for each tenant without a valid one.

    Returns the credentials and the new keys by owner (`admin` or `tenant NAME`), to be shown once.
    """
    new_keys: dict[str, str] = {}
    admin_key = existing.admin_key if existing else ""
    tenants.bound_start_keys(names, (admin_key, *(existing.keys.values() if existing else ())))
    if tenants.verify(admin_key) is None:
        admin_key = new_keys["admin"] = tenants.add_key(None, "start")[0]
    keys: dict[str, str] = {}
    for name in names:
        tenants.put(name, declared=True)
        keys[name] = existing.keys.get(name, "") if existing else ""
        principal = tenants.verify(keys[name])
        if principal is None or principal.tenant != name:
            keys[name] = new_keys[f"tenant {name}"] = tenants.add_key(name, "start")[0]
    credentials = Credentials(url=url, admin_key=admin_key, tenant=names[0], api_key=keys[names[0]], keys=keys)
    return credentials, new_keys


class Connection(msgspec.Struct, frozen=True):
    url: str
    key: str
    """empty for a service with `auth: none`, to which no key is sent"""
    tenant: str | None = None
    key_from: str = ""


class _UserConfig(msgspec.Struct, frozen=True):
    """Content of ~/.config/garnish/config.toml."""

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
    """Returns the URL of the service and the key to send.

    The sources in order are: the arguments, GARNISH_URL and GARNISH_API_KEY, the state's credentials, the user's
    config.toml, and DEFAULT_URL without a key. A key from a file is sent only to the URL in the same file, so that no
    service receives the key of another. Raises StartError if a file exists but can't be read.
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


def _same(one: str, another: str) -> bool:
    return one.rstrip("/") == another.rstrip("/")


def _user_file(environment: Mapping[str, str]) -> Path:
    folder = environment.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(folder) / "garnish" / "config.toml"


def _read_user_config(environment: Mapping[str, str]) -> _UserConfig:
    file = _user_file(environment)
    try:
        return msgspec.convert(tomllib.loads(file.read_text(encoding="utf-8-sig")), _UserConfig)
    except FileNotFoundError:
        return _UserConfig()
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise StartError(f"{file}: {error}") from None
