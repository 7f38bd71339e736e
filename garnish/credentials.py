"""The keys that `garnish up` made, left for the local command line in `<state>/credentials.toml` (mode 0600)."""

from __future__ import annotations

import json
import os
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from adapters.tenants import Tenants
from garnish.errors import StartError

FILE_NAME = "credentials.toml"


class Credentials(msgspec.Struct, frozen=True, kw_only=True):
    """With `auth: none` the keys are empty."""

    url: str
    admin_key: str = ""
    tenant: str
    """The first tenant; `api_key` is its key."""
    api_key: str = ""
    keys: dict[str, str] = {}
    """One key per declared tenant."""


def read_credentials(file: Path) -> Credentials | None:
    """None when there is no such file. Raises StartError when it can't be used."""
    try:
        data = tomllib.loads(file.read_text())
        return msgspec.convert(data, Credentials)
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise StartError(f"{file}: not readable credentials ({error}); delete the file to have new keys made") from None


def write_credentials(file: Path, credentials: Credentials) -> None:
    """Replace the file in one step, so that a reader never sees half of it."""
    lines = [
        f"{name} = {json.dumps(getattr(credentials, name))}"
        for name in ("url", "admin_key", "tenant", "api_key")
        if getattr(credentials, name)
    ]
    lines += ["", "[keys]", *(f"{json.dumps(tenant)} = {json.dumps(key)}" for tenant, key in credentials.keys.items())]
    descriptor, temporary = tempfile.mkstemp(dir=file.parent, prefix=".credentials-")  # mkstemp makes it 0600
    with os.fdopen(descriptor, "w") as stream:
        stream.write("\n".join(lines) + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, file)


def prepare_keys(
    tenants: Tenants, names: Sequence[str], known: Credentials | None, url: str
) -> tuple[Credentials, dict[str, str]]:
    """Make the tenants exist, and a key for whoever has none that still works.

    Returns the credentials and the keys that are new (`admin`, or `tenant NAME`), to be shown once.
    """
    made: dict[str, str] = {}
    admin_key = known.admin_key if known else ""
    if tenants.verify(admin_key) is None:
        admin_key = made["admin"] = tenants.add_admin_key()[0]
    keys: dict[str, str] = {}
    for name in names:
        tenants.put(name, declared=True)
        keys[name] = known.keys.get(name, "") if known else ""
        principal = tenants.verify(keys[name])
        if principal is None or principal.tenant != name:
            keys[name] = made[f"tenant {name}"] = tenants.add_key(name)[0]
    credentials = Credentials(url=url, admin_key=admin_key, tenant=names[0], api_key=keys[names[0]], keys=keys)
    return credentials, made
