"""`garnish usage`: requests, tokens and cold starts."""

from __future__ import annotations

from typing import Annotated

import typer

from garnish.cli.options import DEFAULT_STATE, AsJson, NoHeader, State, Tenant, Url, open_client

GROUPS = ("tenant", "function", "version", "hour")
SUMS = {
    "requests": "REQUESTS",
    "prompt_tokens": "TOKENS IN",
    "completion_tokens": "TOKENS OUT",
    "cold_starts": "COLD",
}

Start = Annotated[str | None, typer.Option("--from", help="A time such as 2026-11-21T17:00Z (default: 24 h ago).")]
End = Annotated[str | None, typer.Option("--to", help="A later one (default: now).")]
GroupBy = Annotated[str, typer.Option("--group-by", help="Of tenant, function, version, hour; several by commas.")]
All = Annotated[bool, typer.Option("--all-tenants", help="Of every tenant, with the admin key of the state.")]


def register(app: typer.Typer) -> None:
    app.command()(usage)


def usage(
    start: Start = None,
    end: End = None,
    group_by: GroupBy = "function",
    all_tenants: All = False,
    url: Url = None,
    state: State = DEFAULT_STATE,
    tenant: Tenant = None,
    no_header: NoHeader = False,
    as_json: AsJson = False,
) -> None:
    """Show what was used, in whole hours."""
    from garnish.screen import Screen
    from garnish.table import Column

    if all_tenants and tenant is not None:
        raise typer.BadParameter("expected --tenant or --all-tenants, not both")
    groups = [group for group in GROUPS if group in group_by.split(",")]
    if unknown := set(filter(None, group_by.split(","))) - set(GROUPS):
        raise typer.BadParameter(f"--group-by: {min(unknown)!r} is none of {', '.join(GROUPS)}")
    screen = Screen(as_json, header=not no_header)
    with open_client(url, state, tenant, admin=all_tenants) as client:
        told = client.usage(start=start, end=end, group_by=groups)
    rows = [[*(_shown(getattr(row, group)) for group in groups), *(_numbers(row))] for row in told.rows]
    rows.append([*["total", *("" for _ in groups[1:])], *_numbers(told.total)])
    named = [Column(name.upper(), least=10) for name in groups or ["all"]]
    screen.table([*named, *(Column(name, number=True) for name in SUMS.values())], rows if groups else rows[-1:])
    screen.result(told)


def _numbers(sums: object) -> list[str]:
    return [str(getattr(sums, name)) for name in SUMS]


def _shown(value: object) -> str:
    """The base model's calls have no version."""
    return "-" if value is None else str(value)
