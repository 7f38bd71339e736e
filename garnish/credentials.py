"""The keys that `garnish up` made, left for the local command line in `<state>/credentials.toml` (mode 0600)."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from adapters.keys import parse_key
from adapters.tenants import Tenants
from garnish.errors import StartError
from infra.text import write_whole

FILE_NAME = "credentials.toml"


class Credentials(msgspec.Struct, frozen=True, kw_only=True):
    """The content of credentials.toml: the service's URL and the keys for it. With `auth: none` the keys are empty."""

    url: str
    admin_key: str = ""
    tenant: str
    """The first tenant; `api_key` is its key."""
    api_key: str = ""
    keys: dict[str, str] = {}
    """One key per declared tenant."""


class OperatorKeys(msgspec.Struct, frozen=True, kw_only=True):
    """Keys that outlive the state directory, in a file of the operator's; a copy of `credentials.toml` will do."""

    admin_key: str = ""
    keys: dict[str, str] = {}


def read_credentials(file: Path) -> Credentials | None:
    """Returns the file's credentials; None when there is no such file. Raises StartError when it can't be used."""
    try:
        data = tomllib.loads(file.read_text())
        return msgspec.convert(data, Credentials)
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise StartError(f"{file}: not readable credentials ({error}); delete the file to have new keys made") from None


def write_credentials(file: Path, credentials: Credentials) -> None:
    """Replaces the file in one step, so that a reader never sees half of it."""
    lines = [
        f"{name} = {json.dumps(getattr(credentials, name))}"
        for name in ("url", "admin_key", "tenant", "api_key")
        if getattr(credentials, name)
    ]
    lines += ["", "[keys]", *(f"{json.dumps(tenant)} = {json.dumps(key)}" for tenant, key in credentials.keys.items())]
    write_whole(file, "\n".join(lines) + "\n")


def read_operator_keys(file: Path) -> OperatorKeys:
    """Returns the keys that the operator has chosen. Raises StartError when the file is missing, readable by others, or
    holds what is no key."""
    where = f"gateway.credentials_file: {file}"
    try:
        mode = file.stat().st_mode & 0o777
        chosen = msgspec.convert(tomllib.loads(file.read_text()), OperatorKeys)
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


def adopt_keys(tenants: Tenants, names: Sequence[str], chosen: OperatorKeys, known: Credentials | None) -> Credentials:
    """Makes the operator's keys of these tenants valid; returns `known` with them in place of its own."""
    keys = {name: chosen.keys[name] for name in names if chosen.keys.get(name)}
    for key in filter(None, (chosen.admin_key, *keys.values())):
        tenants.adopt_key(key)
    known = known or Credentials(url="", tenant=names[0])
    return msgspec.structs.replace(known, admin_key=chosen.admin_key or known.admin_key, keys={**known.keys, **keys})


def prepare_keys(
    tenants: Tenants, names: Sequence[str], known: Credentials | None, url: str
) -> tuple[Credentials, dict[str, str]]:
    """Makes the tenants exist, and a key for whoever has none that still works.

    Returns the credentials and the keys that are new (`admin`, or `tenant NAME`), to be shown once.
    """
    made: dict[str, str] = {}
    admin_key = known.admin_key if known else ""
    tenants.bound_start_keys(names, (admin_key, *(known.keys.values() if known else ())))
    if tenants.verify(admin_key) is None:
        admin_key = made["admin"] = tenants.add_key(None, "start")[0]
    keys: dict[str, str] = {}
    for name in names:
        tenants.put(name, declared=True)
        keys[name] = known.keys.get(name, "") if known else ""
        principal = tenants.verify(keys[name])
        if principal is None or principal.tenant != name:
            keys[name] = made[f"tenant {name}"] = tenants.add_key(name, "start")[0]
    credentials = Credentials(url=url, admin_key=admin_key, tenant=names[0], api_key=keys[names[0]], keys=keys)
    return credentials, made
