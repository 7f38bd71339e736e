"""Messages of the routes for tenants and usage. They check requests, and openapi.json is made from them."""

from __future__ import annotations

import msgspec

from adapters.slo import Slo, Weight
from adapters.tenants import Limits


class TenantRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole of what is to hold; what is absent is not limited or promised."""

    slo: Slo | None = None
    limits: Limits | None = None
    weight: Weight = 1.0
    """Its share of the nodes is to the others' as its weight is to theirs."""


class KeyItem(msgspec.Struct, frozen=True):
    """A key without its text, which only its maker has seen. Times are Unix time."""

    key_id: str
    created: float
    revoked: float | None


class Attainment(msgspec.Struct, frozen=True):
    """Shares of the calls that ended in a window, as all gateway workers saw them; null where there was
    none, or nothing was promised."""

    window_seconds: int
    calls: int
    ttft: float | None
    tpot: float | None
    all: float | None
    """Everything that was promised held."""


class TenantReply(msgspec.Struct, frozen=True):
    id: str
    slo: Slo
    limits: Limits
    weight: float
    declared: bool
    """Whether serverless.yml declares it: then only its keys can be changed here."""
    keys: list[KeyItem]
    attainment: list[Attainment]
    """Of the SLO, over the last minute, ten minutes and hour; empty while nothing is promised."""


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
