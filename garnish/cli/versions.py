"""`garnish alias`, `rollback`, `policy` and `warm`.

They control which version an alias points to, and how a function is served.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer

from garnish.cli.functions import Name, format_target
from garnish.cli.options import Output, TableOutput, TenantService, Warm
from garnish.screen import Column, Screen
from garnish.sizes import format_time, parse_seconds, parse_whole_seconds

if TYPE_CHECKING:
    from gateway.routes.aliases import AliasPast, AliasReply

IfMatch = Annotated[
    int | None, typer.Option("--if-match", help="Only if the function is still at this generation (of `describe`).")
]
PolicyIfMatch = Annotated[int | None, typer.Option("--if-match", help="Only at this generation of the function.")]
DURATION_FIELDS = ("timeout", "max_age", "idle_ttl")


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
    """Point an alias to a version, or split its calls between versions. Without TARGET, show the alias."""
    new_target = parse_target(target) if target else None
    screen = output.screen()
    with service.client(service.tenant) as client:
        reply = (
            client.alias(name, alias)
            if new_target is None
            else client.set_alias(name, alias, new_target, if_match, warm=warm)
        )
    _show(screen, reply, with_history=new_target is None)


def rollback(
    service: TenantService,
    output: Output,
    name: Name,
    alias: Annotated[str, typer.Option("--alias", help="The alias to roll back.")] = "latest",
    if_match: IfMatch = None,
    warm: Warm = False,
) -> None:
    """Point an alias to its previous target. Each further rollback goes back by one more target."""
    screen = output.screen()
    with service.client(service.tenant) as client:
        reply = client.roll_back(name, alias, if_match, warm=warm)
    _show(screen, reply, with_history=False)


def parse_target(words: list[str]) -> int | dict[str, float]:
    """Returns an alias's target: the version of `4`, or the shares of `3=0.9 4=0.1` (or `3=90% 4=10%`).

    Raises typer.BadParameter for any other text. The service checks that versions exist and shares sum to 1.
    """
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
    screen.line(f"{reply.function}:{reply.alias} -> {_target(reply)}")
    for warning in reply.warnings:
        screen.notice(f"warning: {warning}")
    if with_history and reply.history:
        rows = [[_target(past), format_time(past.since)] for past in reply.history]
        screen.table([Column("BEFORE", min_width=20), Column("SINCE")], rows)
    screen.result(reply)


def _target(place: AliasReply | AliasPast) -> str:
    return format_target(place.weights if place.version is None else place.version)


def policy(
    service: TenantService,
    output: Output,
    name: Annotated[str, typer.Argument(help="The function's name.")],
    fields: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FIELD=VALUE]...", help="JSON, or durations such as 15m; FIELD= takes it back."),
    ] = None,
    if_match: PolicyIfMatch = None,
) -> None:
    """Show a function's policy, or change it: `garnish policy summarize max_concurrency=8 idle_ttl=15m warm=`."""
    changes = dict(_field(text) for text in fields or ())
    screen = output.screen()
    with service.client(service.tenant) as client:
        function = client.set_policy(name, changes, if_match) if changes else client.function(name)
    for field, value in function.policy.items():
        screen.line(f"{field}: {msgspec.json.encode(value).decode()}")
    if not function.policy:
        screen.notice("the service's defaults hold")
    screen.result(function.policy)


def _field(text: str) -> tuple[str, Any]:
    """Returns a policy field's name and value; None resets the field. Raises typer.BadParameter."""

    field, equals, written = text.partition("=")
    if not field or not equals:
        raise typer.BadParameter(f"{text!r}: expected FIELD=VALUE, such as max_concurrency=8")
    if not written:
        return field, None
    try:
        if field in DURATION_FIELDS and written != "null":
            return field, parse_seconds(written)
        value = msgspec.json.decode(written)
        for window in value if field == "warm" and isinstance(value, list) else ():
            if isinstance(window, dict) and isinstance(window.get("for"), str):
                window["for"] = parse_whole_seconds(window["for"])
        return field, value
    except msgspec.DecodeError:
        return field, written  # a text such as strict
    except ValueError as error:
        raise typer.BadParameter(f"{field}: {error}") from None


def warm(
    service: TenantService,
    output: TableOutput,
    name: Annotated[str, typer.Argument(help="The function, or NAME:ALIAS, or NAME:VERSION.")],
    tier: Annotated[Literal["device", "host"], typer.Option("--tier", help="Which memory of the nodes.")] = "device",
    copies: Annotated[int, typer.Option("--copies", help="On how many nodes.", min=1, max=16)] = 1,
) -> None:
    """Load the adapters that calls of a function would use on its nodes now, and keep them for 5 minutes."""
    function, _, version = name.partition(":")
    screen = output.screen()
    with service.client(service.tenant) as client:
        reply = client.warm(function, version or None, tier=tier, copies=copies)
    rows = [[str(place.version), place.node, place.tier, place.error or "-"] for place in reply.places]
    columns = [
        Column("VERSION", number=True),
        Column("NODE", min_width=12),
        Column("TIER"),
        Column("ERROR", min_width=16),
    ]
    screen.table(columns, rows)
    if not reply.ready and not any(place.error for place in reply.places):
        screen.notice("it is on its way: the same command again shows how far it has come")
    screen.result(reply)
