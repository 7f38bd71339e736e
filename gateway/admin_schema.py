"""Messages of the routes for tenants and usage. They check requests, and openapi.json is made from them."""

from __future__ import annotations

import msgspec

from adapters.tenants import Limits, Slo


class TenantRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole of what is to hold; what is absent is not limited. `slo` and a `weight` other than 1 are
    refused: nothing enforces them yet."""

    slo: Slo | None = None
    limits: Limits | None = None
    weight: float = 1.0


class KeyItem(msgspec.Struct, frozen=True):
    """A key without its text, which only its maker has seen. Times are Unix time."""

    key_id: str
    created: float
    revoked: float | None


class TenantReply(msgspec.Struct, frozen=True):
    id: str
    slo: Slo
    limits: Limits
    weight: float
    declared: bool
    """Whether serverless.yml declares it: then only its keys can be changed here."""
    keys: list[KeyItem]


class NewKeyReply(msgspec.Struct, frozen=True):
    """`key` is shown this once; the service keeps a hash."""

    tenant: str
    key_id: str
    key: str
    created: float


class UsageSums(msgspec.Struct, frozen=True):
    requests: int
    prompt_tokens: int
    completion_tokens: int
    cold_starts: int


class UsageRow(msgspec.Struct, frozen=True):
    """Sums of one group; what it is not grouped by is null, and so is the base model's version."""

    tenant: str | None
    function: str | None
    version: int | None
    hour: str | None
    requests: int
    prompt_tokens: int
    completion_tokens: int
    cold_starts: int


class UsageReply(msgspec.Struct, frozen=True, rename={"start": "from", "end": "to"}):
    """`from` and `to` are Unix time at whole hours: the time asked for, widened to them."""

    start: int
    end: int
    group_by: list[str]
    rows: list[UsageRow]
    total: UsageSums
