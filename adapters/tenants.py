"""Tenants and their keys. The registry keeps only hashes of keys; a key is shown once, when it is made."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from adapters.errors import Conflict, InvalidRequest, NotFound
from adapters.names import is_name
from adapters.records import read_record, update_record
from adapters.store import ObjectStore

ADMIN_KEY = "admin.json"
MAX_KEYS = 1000
"""Keys of one tenant that are kept, revoked ones included."""

_KEY_ID = re.compile(r"[0-9a-f]{12}", re.ASCII)
_SECRET = re.compile(r"[0-9a-f]{64}", re.ASCII)
_NOBODY = hashlib.sha256(b"no such key").hexdigest()

Positive = Annotated[float, Meta(gt=0)]


class Slo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"slo_class": "class"}):
    ttft_ms: Positive | None = None
    tpot_ms: Positive | None = None
    attain: Annotated[float, Meta(gt=0, le=1)] = 0.99
    slo_class: Literal["strict", "best_effort"] = "best_effort"


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """None: not limited."""

    rps: Positive | None = None
    tokens_per_minute: Positive | None = None
    concurrent: Annotated[int, Meta(ge=1)] | None = None
    adapters: Annotated[int, Meta(ge=1)] | None = None
    bytes: Annotated[int, Meta(ge=1)] | None = None


class KeyRecord(msgspec.Struct, frozen=True):
    key_id: str
    sha256: str
    """Hash of the whole key text; keys have 256 random bits, so a plain hash can't be searched."""
    created: float
    revoked: float | None = None


class Tenant(msgspec.Struct, frozen=True):
    """tenant.json"""

    id: str
    keys: tuple[KeyRecord, ...] = ()
    slo: Slo = Slo()
    limits: Limits = Limits()
    weight: Positive = 1.0
    declared: bool = False
    """Whether serverless.yml declares it: then only its keys may be changed through the API."""


class Admin(msgspec.Struct, frozen=True):
    """admin.json"""

    keys: tuple[KeyRecord, ...] = ()


class Principal(msgspec.Struct, frozen=True):
    """Whose key a request carries. `tenant` is None for an admin key."""

    tenant: str | None
    key_id: str


def new_key(tenant: str | None) -> tuple[str, KeyRecord]:
    """A fresh key of a tenant (None: an admin key) as (text to show once, record to keep)."""
    key_id = secrets.token_hex(6)
    prefix = "gak" if tenant is None else f"gsk_{tenant}"
    text = f"{prefix}_{key_id}_{secrets.token_hex(32)}"
    return text, KeyRecord(key_id=key_id, sha256=_hash(text), created=time.time())


def parse_key(text: str) -> Principal | None:
    """Whose key the text claims to be, or None if it has not the form of a key. Nothing is verified."""
    kind, _, rest = text.partition("_")
    parts = rest.rsplit("_", 2)
    if not _SECRET.fullmatch(parts[-1]) or len(parts) < 2 or not _KEY_ID.fullmatch(parts[-2]):
        return None
    if kind == "gak" and len(parts) == 2:
        return Principal(tenant=None, key_id=parts[-2])
    if kind == "gsk" and len(parts) == 3 and is_name(parts[0]):
        return Principal(tenant=parts[0], key_id=parts[-2])
    return None


class Tenants:
    """Tenant records and keys in the store. Methods block; they may be called from any thread."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store

    def get(self, tenant: str) -> Tenant:
        """Raises NotFound."""
        found = self._read(tenant) if is_name(tenant) else None
        if found is None:
            raise NotFound(f"there is no tenant {tenant[:100]!r}")
        return found[0]

    def list(self, after: str = "", limit: int = 1000) -> Sequence[Tenant]:
        """A page of the tenants, in the order of the store's folders."""
        found = (self._read(name) for name in self.store.folders("tenants/", after, limit))
        return tuple(item[0] for item in found if item is not None)

    def put(
        self,
        tenant: str,
        *,
        slo: Slo | None = None,
        limits: Limits | None = None,
        weight: float | None = None,
        declared: bool | None = None,
    ) -> Tenant:
        """Make the tenant, or change what is given; its keys stay.

        Raises InvalidRequest for a malformed name and for values outside their ranges.
        """
        if not is_name(tenant):
            raise InvalidRequest("tenant", f"malformed tenant name {tenant[:100]!r}")
        given = {"slo": slo, "limits": limits, "weight": weight, "declared": declared}
        fields = {name: value for name, value in given.items() if value is not None}
        return self._change(tenant, lambda record: msgspec.structs.replace(record, **fields), create=True)

    def add_key(self, tenant: str) -> tuple[str, KeyRecord]:
        """A new key of an existing tenant; the text is not kept anywhere. Raises NotFound, or Conflict at MAX_KEYS."""
        text, key = new_key(tenant)
        self._change(tenant, lambda record: msgspec.structs.replace(record, keys=_added(record.keys, key)))
        return text, key

    def revoke_key(self, tenant: str, key_id: str) -> None:
        """Raises NotFound. Revoking twice is no error."""
        self._change(tenant, lambda record: msgspec.structs.replace(record, keys=_revoked(record.keys, key_id)))

    def add_admin_key(self) -> tuple[str, KeyRecord]:
        """A new admin key; the text is not kept anywhere."""
        text, key = new_key(None)
        update_record(self.store, ADMIN_KEY, Admin, lambda admin: Admin(_added((admin or Admin()).keys, key)))
        return text, key

    def revoke_admin_key(self, key_id: str) -> None:
        """Raises NotFound."""
        update_record(self.store, ADMIN_KEY, Admin, lambda admin: Admin(_revoked((admin or Admin()).keys, key_id)))

    def verify(self, text: str) -> Principal | None:
        """The key's owner, or None for anything but a valid, unrevoked key."""
        claim = parse_key(text)
        keys: tuple[KeyRecord, ...] = ()
        if claim is not None and claim.tenant is None:
            keys = (read_record(self.store, ADMIN_KEY, Admin) or (Admin(), ""))[0].keys
        elif claim is not None and claim.tenant is not None:
            found = self._read(claim.tenant)
            keys = found[0].keys if found else ()
        known = next((key for key in keys if claim and key.key_id == claim.key_id and key.revoked is None), None)
        # Unknown keys are compared too, so that the time taken does not tell which ids exist.
        same = hmac.compare_digest(_hash(text), known.sha256 if known else _NOBODY)
        return claim if same and known else None

    def _read(self, tenant: str) -> tuple[Tenant, str] | None:
        return read_record(self.store, _tenant_key(tenant), Tenant)

    def _change(self, tenant: str, change: Callable[[Tenant], Tenant], create: bool = False) -> Tenant:
        def apply(record: Tenant | None) -> Tenant:
            if record is None and not create:
                raise NotFound(f"there is no tenant {tenant[:100]!r}")
            return _checked(change(record or Tenant(id=tenant)))

        if not is_name(tenant):
            raise NotFound(f"there is no tenant {tenant[:100]!r}")
        return update_record(self.store, _tenant_key(tenant), Tenant, apply)


def _tenant_key(tenant: str) -> str:
    return f"tenants/{tenant}/tenant.json"


def _checked(record: Tenant) -> Tenant:
    """The record as it will be read; constraints hold only when a record is decoded. Raises InvalidRequest."""
    try:
        return msgspec.json.decode(msgspec.json.encode(record), type=Tenant)
    except msgspec.ValidationError as error:
        raise InvalidRequest("tenant", f"tenant {record.id}: {error}") from None


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _added(keys: tuple[KeyRecord, ...], key: KeyRecord) -> tuple[KeyRecord, ...]:
    if len(keys) >= MAX_KEYS:
        raise Conflict(f"there are {MAX_KEYS} keys already")
    return (*keys, key)


def _revoked(keys: tuple[KeyRecord, ...], key_id: str) -> tuple[KeyRecord, ...]:
    if all(key.key_id != key_id for key in keys):
        raise NotFound(f"there is no key {key_id[:100]!r}")
    now = time.time()
    return tuple(
        msgspec.structs.replace(key, revoked=now) if key.key_id == key_id and key.revoked is None else key
        for key in keys
    )
