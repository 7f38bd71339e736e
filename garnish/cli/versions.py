"""`garnish alias` and `rollback`: which version a function's names mean."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import typer

from garnish.cli.functions import Name, pointed
from garnish.cli.options import Output, TableOutput, TenantService, Warm

if TYPE_CHECKING:
    from garnish.screen import Screen
    from gateway.routes.aliases import AliasPast, AliasReply

IfMatch = Annotated[
    int | None, typer.Option("--if-match", help="Only if the function is still at this generation (of `describe`).")
]


def alias(
    service: TenantService,
    output: TableOutput,
    name: Name,
    alias: Annotated[str, typer.Argument(help="The alias, such as prod.")],
    target: Annotated[
        list[str] | None, typer.Argument(help="A version (4), or shares of the calls (3=0.9 4=0.1); none: show it.")
    ] = None,
    if_match: IfMatch = None,
    warm: Warm = False,
) -> None:
    """Point an alias to a version, or split its calls between some; without TARGET, show it."""
    wanted = parse_target(target) if target else None
    screen = output.screen()
    with service.client(service.tenant) as client:
        reply = (
            client.alias(name, alias) if wanted is None else client.set_alias(name, alias, wanted, if_match, warm=warm)
        )
    _show(screen, reply, with_history=wanted is None)


def rollback(
    service: TenantService,
    output: Output,
    name: Name,
    alias: Annotated[str, typer.Option("--alias", help="The alias to roll back.")] = "latest",
    if_match: IfMatch = None,
    warm: Warm = False,
) -> None:
    """Point an alias to what it pointed to before; again: one further back."""
    screen = output.screen()
    with service.client(service.tenant) as client:
        reply = client.roll_back(name, alias, if_match, warm=warm)
    _show(screen, reply, with_history=False)


def parse_target(words: list[str]) -> int | dict[str, float]:
    """Returns what the words name: the version of `4`, or the shares of `3=0.9 4=0.1` (or `3=90% 4=10%`). Raises
    typer.BadParameter; the service checks versions and sums."""
    if len(words) == 1 and words[0].isascii() and words[0].isdigit():
        return int(words[0])
    shares: dict[str, float] = {}
    for word in words:
        version, equals, share = word.partition("=")
        try:
            number = float(share.removesuffix("%")) / (100 if share.endswith("%") else 1)
        except ValueError:
            number = math.nan
        if not equals or not version or version in shares or not math.isfinite(number):
            raise typer.BadParameter(f"{word!r}: expected one version such as 4, or shares such as 3=0.9 4=0.1")
        shares[version] = number
    return shares


def _show(screen: Screen, reply: AliasReply, *, with_history: bool) -> None:
    from garnish.table import Column
    from garnish.text import shown_time

    screen.line(f"{reply.function}:{reply.alias} -> {_target(reply)}")
    for warning in reply.warnings:
        screen.note(f"warning: {warning}")
    if with_history and reply.history:
        rows = [[_target(past), shown_time(past.since)] for past in reply.history]
        screen.table([Column("BEFORE", least=20), Column("SINCE")], rows)
    screen.result(reply)


def _target(place: AliasReply | AliasPast) -> str:
    return pointed(place.weights if place.version is None else place.version)
