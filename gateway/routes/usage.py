"""GET /usage: usage of calls and memory, by tenant, function, version and hour."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import Any, get_args

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from adapters.errors import NotFound
from adapters.names import is_name
from adapters.store import MAX_LIST
from cluster.errors import ServiceError
from gateway.groups import Admin
from gateway.http.errors import invalid
from gateway.http.params import TENANT_HEADER
from gateway.http.rates import READ_MANY
from gateway.http.responses import json_response
from gateway.http.routing import Caller, Routes, parameter
from gateway.prices import Prices
from gateway.usage.counts import UsageCounts, cost_of
from gateway.usage.hours import HOUR
from gateway.usage.report import GROUPS, Group, Sheet, sum_usage

routes = Routes(Admin)

DEFAULT_HOURS = 24
MAX_HOURS = 366 * 24
YEAR_2100 = 4102444800
TENANTS_AT_ONCE = 4
_ABOUT_TIME = "Unix time, or ISO 8601 (UTC where it names no zone); widened to whole hours"


class UsageSums(msgspec.Struct, frozen=True, kw_only=True):
    """Sums of usage over calls, and over the time for which nodes keep adapters in memory. `cost` is null if no prices
    are configured."""

    requests: int
    prompt_tokens: int
    completion_tokens: int
    cold_starts: int
    device_seconds: float = 0.0
    device_gb_seconds: float = 0.0
    host_gb_seconds: float = 0.0
    device_pinned_gb_seconds: float = 0.0
    host_pinned_gb_seconds: float = 0.0
    cost: float | None = None


class UsageRow(UsageSums, frozen=True, kw_only=True):
    """Usage of one group of calls. Fields that are not in `group_by` are null. `version` is also null for the base
    model."""

    tenant: str | None
    function: str | None
    version: int | None
    hour: str | None


class UsageReply(msgspec.Struct, frozen=True, rename={"start": "from", "end": "to"}):
    """Usage between `from` and `to`, in Unix time. Both are whole hours: the requested period is widened to whole
    hours."""

    start: int
    end: int
    group_by: list[str]
    rows: list[UsageRow]
    total: UsageSums


@routes.caller(
    "GET /usage",
    "Requests, tokens, cold starts, device time and memory of the caller's tenant; with an admin key of any, or of all",
    {200: UsageReply},
    parameters=(
        parameter("query", "tenant", "With an admin key: whose (all tenants, when absent)"),
        parameter("query", "from", f"{_ABOUT_TIME}, 366 days before `to` at most. Default: 24 hours before `to`"),
        parameter("query", "to", f"{_ABOUT_TIME}. Default: now"),
        parameter("query", "group_by", "Of tenant, function, version, hour; several by commas. Default: function"),
        parameter("header", TENANT_HEADER, "As `tenant`"),
    ),
    errors=(404,),
    rate=READ_MANY,
)
async def get_usage(request: Request, admin: Admin, caller: Caller) -> Response:
    tenant = _tenant(request, caller)
    start, end = _span(request, time.time())
    sheet = Sheet(_groups(request))
    if tenant is None:
        await _add_all(admin, sheet, start, end)
    else:
        await _add(admin, sheet, tenant, start, end)
        if not sheet.rows:
            await admin.callers.account(tenant)  # a deleted tenant may have usage; an unknown tenant raises NotFound
    prices = admin.config.prices
    empty: dict[str, Any] = dict.fromkeys(GROUPS)
    rows = [msgspec.convert({**empty, **groups, **_sums(sums, prices)}, UsageRow) for groups, sums in sheet.ordered()]
    total = msgspec.convert(_sums(sheet.total, prices), UsageSums)
    return json_response(UsageReply(start, end, list(sheet.groups), rows, total))


def _sums(counts: UsageCounts, prices: Prices | None) -> dict[str, Any]:
    """Returns the fields of UsageSums, rounded to millionths."""
    fields: dict[str, Any] = {name: round(value, 6) for name, value in msgspec.structs.asdict(counts).items()}
    return fields if prices is None else fields | {"cost": cost_of(counts, prices)}


def _tenant(request: Request, caller: Caller) -> str | None:
    """Returns the tenant that the query names; None if it means all tenants. Raises ServiceError, NotFound."""
    parameter, header = request.query_params.get("tenant"), request.headers.get(TENANT_HEADER)
    if None not in (parameter, header) and parameter != header:
        raise invalid("tenant", f"{TENANT_HEADER} names another tenant")
    tenant = parameter if parameter is not None else header
    if not caller.admin:
        if tenant not in (None, caller.tenant):
            raise ServiceError("forbidden", "only an admin key may ask for another tenant", param="tenant")
        return caller.tenant
    if tenant is not None and not is_name(tenant):
        raise NotFound(f"there is no tenant {tenant[:100]!r}")
    return tenant


async def _add_all(admin: Admin, sheet: Sheet, start: int, end: int) -> None:
    after = ""
    while names := await admin.threads.read(admin.registry.store.folders, "tenants/", after, MAX_LIST):
        for first in range(0, len(names), TENANTS_AT_ONCE):
            together = names[first : first + TENANTS_AT_ONCE]
            await asyncio.gather(*(_add(admin, sheet, name, start, end) for name in together))
        after = names[-1]


async def _add(admin: Admin, sheet: Sheet, tenant: str, start: int, end: int) -> None:
    newer = admin.usage.unwritten(tenant)
    store = admin.registry.store
    sheet.include(await admin.threads.read(sum_usage, store, tenant, start, end, newer, sheet.groups))


def _groups(request: Request) -> list[Group]:
    stated = request.query_params.get("group_by", "function")
    groups = [part for part in stated.split(",") if part]
    for group in groups:
        if group not in get_args(Group):
            shown = ", ".join(GROUPS)
            raise invalid("group_by", f"group_by must be a comma-separated list of {shown}")
    return [group for group in GROUPS if group in groups]


def _span(request: Request, now: float) -> tuple[int, int]:
    """Returns start and end of the requested period as Unix time, widened to whole hours."""
    end = -(-_time(request, "to", now) // HOUR) * HOUR
    start = _time(request, "from", max(0, end - DEFAULT_HOURS * HOUR)) // HOUR * HOUR
    if not 0 < end - start <= MAX_HOURS * HOUR:
        raise invalid("from", f"from must be before to, by {MAX_HOURS} hours at most")
    return int(start), int(end)


def _time(request: Request, name: str, default: float) -> float:
    """Returns the query parameter `name` as Unix time, or `default` if it is absent. It may be stated as Unix time or
    in ISO 8601 (UTC without a zone)."""
    text = request.query_params.get(name)
    if text is None:
        return default
    try:
        if text.isascii() and text.isdigit() and len(text) <= len(str(YEAR_2100)):
            seconds = float(text)
        else:
            stated = datetime.fromisoformat(text)
            seconds = (stated if stated.tzinfo else stated.replace(tzinfo=UTC)).timestamp()
        if not 0 <= seconds < YEAR_2100:
            raise ValueError
    except (ValueError, OverflowError):
        expected = "expected Unix time, or a time such as 2026-11-21T17:00Z"
        raise invalid(name, f"{name}: {expected}") from None
    return seconds
