"""`garnish usage`: shows requests, tokens, cold starts, device time, adapters' memory, and their cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from garnish.cli.options import TableOutput, TenantService
from garnish.screen import Column

if TYPE_CHECKING:
    from gateway.routes.usage import UsageSums

GROUPS = ("tenant", "function", "version", "hour")
SUMS = {
    "requests": ("REQUESTS", 0),
    "prompt_tokens": ("TOKENS IN", 0),
    "completion_tokens": ("TOKENS OUT", 0),
    "cold_starts": ("COLD", 0),
    "device_seconds": ("DEVICE S", 1),
    "device_gb_seconds": ("GB S DEVICE", 2),
    "device_pinned_gb_seconds": ("PINNED", 4),
    "host_gb_seconds": ("GB S HOST", 3),
    "host_pinned_gb_seconds": ("PINNED", 4),
}
"""Columns by field, each with its title and its order of removal on a narrow terminal (`Column.spare`)."""

Start = Annotated[str | None, typer.Option("--from", help="A time such as 2026-11-21T17:00Z (default: 24 h ago).")]
End = Annotated[str | None, typer.Option("--to", help="A later one (default: now).")]
GroupBy = Annotated[str, typer.Option("--group-by", help="Of tenant, function, version, hour; several by commas.")]
All = Annotated[bool, typer.Option("--all-tenants", help="Of every tenant, with the admin key of the state.")]


def usage(
    service: TenantService,
    output: TableOutput,
    start: Start = None,
    end: End = None,
    group_by: GroupBy = "function",
    all_tenants: All = False,
) -> None:
    """Show the usage, in whole hours."""
    if all_tenants and service.tenant is not None:
        raise typer.BadParameter("expected --tenant or --all-tenants, not both")
    groups = [group for group in GROUPS if group in group_by.split(",")]
    if unknown := set(filter(None, group_by.split(","))) - set(GROUPS):
        raise typer.BadParameter(f"--group-by: {min(unknown)!r} is none of {', '.join(GROUPS)}")
    screen = output.screen()
    with service.client(service.tenant, admin=all_tenants) as client:
        reply = client.usage(start=start, end=end, group_by=groups)
    rows = [[*(_shown(getattr(row, group)) for group in groups), *(_numbers(row))] for row in reply.rows]
    rows.append([*["total", *("" for _ in groups[1:])], *_numbers(reply.total)])
    group_columns = [Column(name.upper(), min_width=10) for name in groups or ["all"]]
    sums = [*SUMS.values(), *([("COST", 0)] if reply.total.cost is not None else [])]
    numbers = [Column(name, number=True, spare=spare) for name, spare in sums]
    screen.table([*group_columns, *numbers], rows if groups else rows[-1:])
    screen.result(reply)


def _numbers(sums: UsageSums) -> list[str]:
    numbers = [getattr(sums, name) for name in SUMS] + ([sums.cost] if sums.cost is not None else [])
    return [str(number) if isinstance(number, int) else f"{number:.3f}" for number in numbers]


def _shown(value: object) -> str:
    """Returns the value as text, and `-` for None, such as the version of the base model's calls."""
    return "-" if value is None else str(value)
