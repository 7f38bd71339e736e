"""`garnish warm`: brings a function's adapter to nodes before it is called."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from garnish.cli.options import DEFAULT_STATE, AsJson, NoHeader, State, Tenant, Url, open_client


class WarmTier(StrEnum):
    device = "device"
    host = "host"


def register(app: typer.Typer) -> None:
    app.command()(warm)


def warm(
    name: Annotated[str, typer.Argument(help="The function, or NAME:ALIAS, or NAME:VERSION.")],
    tier: Annotated[WarmTier, typer.Option("--tier", help="Which memory of the nodes.")] = WarmTier.device,
    copies: Annotated[int, typer.Option("--copies", help="On how many nodes.", min=1, max=16)] = 1,
    url: Url = None,
    state: State = DEFAULT_STATE,
    tenant: Tenant = None,
    no_header: NoHeader = False,
    as_json: AsJson = False,
) -> None:
    """Bring what calls of a function would run to its nodes now, and keep it wanted there for 5 minutes."""
    from garnish.screen import Screen
    from garnish.table import Column

    function, _, version = name.partition(":")
    screen = Screen(as_json, header=not no_header)
    with open_client(url, state, tenant) as client:
        reply = client.warm(function, version or None, tier=tier.value, copies=copies)
    rows = [[str(place.version), place.node, place.tier, place.error or "-"] for place in reply.places]
    columns = [Column("VERSION", number=True), Column("NODE", least=12), Column("TIER"), Column("ERROR", least=16)]
    screen.table(columns, rows)
    if not reply.ready and not any(place.error for place in reply.places):
        screen.note("it is on its way: the same command again shows how far it has come")
    screen.result(reply)
