"""API keys: their text, which is shown only once, and the stored record, which has its hash."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Sequence
from typing import Literal

import msgspec

from adapters.errors import InvalidRequest
from adapters.names import is_name

_KEY_ID = re.compile(r"[0-9a-f]{12}", re.ASCII)
_SECRET = re.compile(r"[0-9a-f]{64}", re.ASCII)
_NOBODY = hashlib.sha256(b"no such key").hexdigest()


class KeyRecord(msgspec.Struct, frozen=True):
    """Stored record of an API key. Times are Unix times; `revoked` None: the key is valid."""

    key_id: str
    sha256: str
    """SHA-256 (hex) of the complete key text. Keys have 256 random bits, so an unsalted hash is safe."""
    created: float
    revoked: float | None = None
    made_by: Literal["start", "operator"] | None = None
    """Origin of the key. start: a starting service created it for itself. operator: a service read it from the
    operator's file. None: an administrator created it through the API."""


class Principal(msgspec.Struct, frozen=True):
    """Owner of a key: a tenant, or an administrator (`tenant` None). A result of `parse_key` is only claimed, not
    verified."""

    tenant: str | None
    key_id: str


def new_key(tenant: str | None, made_by: Literal["start"] | None = None) -> tuple[str, KeyRecord]:
    """Returns a new key of a tenant (None: an admin key) as (text to show once, record to store)."""
    key_id = secrets.token_hex(6)
    prefix = "gak" if tenant is None else f"gsk_{tenant}"
    text = f"{prefix}_{key_id}_{secrets.token_hex(32)}"
    return text, KeyRecord(key_id=key_id, sha256=_hash(text), created=time.time(), made_by=made_by)


def operator_key(text: str) -> tuple[Principal, KeyRecord]:
    """Returns the owner of a key that the operator chose, and its record. Raises InvalidRequest when `text` does not
    have the form of a key."""
    owner = parse_key(text)
    if owner is None:
        form = "gak_ID_SECRET for an admin, gsk_TENANT_ID_SECRET for a tenant; ID: 12, SECRET: 64 hexadecimal digits"
        raise InvalidRequest("key", f"not a key: a key has the form {form}")
    return owner, KeyRecord(key_id=owner.key_id, sha256=_hash(text), created=time.time(), made_by="operator")


def parse_key(text: str) -> Principal | None:
    """Returns the owner that the key text claims, without verifying it. Returns None if the text does not have the form
    of a key."""
    kind, _, rest = text.partition("_")
    parts = rest.rsplit("_", 2)
    if not _SECRET.fullmatch(parts[-1]) or len(parts) < 2 or not _KEY_ID.fullmatch(parts[-2]):
        return None
    if kind == "gak" and len(parts) == 2:
        return Principal(tenant=None, key_id=parts[-2])
    if kind == "gsk" and len(parts) == 3 and is_name(parts[0]):
        return Principal(tenant=parts[0], key_id=parts[-2])
    return None


def opens(text: str, key_id: str, keys: Sequence[KeyRecord]) -> bool:
    """Returns whether `text` is the key with this id, and is not revoked."""
    record = next((key for key in keys if key.key_id == key_id and key.revoked is None), None)
    # Unknown keys are compared too, so that the time does not reveal which ids exist.
    same = hmac.compare_digest(_hash(text), record.sha256 if record else _NOBODY)
    return same and record is not None


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
