"""`garnish warm`: brings a function's adapter to nodes before it is called."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from garnish.cli.options import TableOutput, TenantService


def warm(
    service: TenantService,
    output: TableOutput,
    name: Annotated[str, typer.Argument(help="The function, or NAME:ALIAS, or NAME:VERSION.")],
    tier: Annotated[Literal["device", "host"], typer.Option("--tier", help="Which memory of the nodes.")] = "device",
    copies: Annotated[int, typer.Option("--copies", help="On how many nodes.", min=1, max=16)] = 1,
) -> None:
    """Bring what calls of a function would run to its nodes now, and keep it wanted there for 5 minutes."""
    from garnish.table import Column

    function, _, version = name.partition(":")
    screen = output.screen()
    with service.client(service.tenant) as client:
        reply = client.warm(function, version or None, tier=tier, copies=copies)
    rows = [[str(place.version), place.node, place.tier, place.error or "-"] for place in reply.places]
    columns = [Column("VERSION", number=True), Column("NODE", least=12), Column("TIER"), Column("ERROR", least=16)]
    screen.table(columns, rows)
    if not reply.ready and not any(place.error for place in reply.places):
        screen.note("it is on its way: the same command again shows how far it has come")
    screen.result(reply)
