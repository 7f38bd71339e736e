"""`garnish policy`: shows a function's policy, or changes fields of it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from garnish.cli.options import Output, TenantService

DURATIONS = ("timeout", "max_age", "idle_ttl")

IfMatch = Annotated[int | None, typer.Option("--if-match", help="Only at this generation of the function.")]


def policy(
    service: TenantService,
    output: Output,
    name: Annotated[str, typer.Argument(help="The function's name.")],
    fields: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FIELD=VALUE]...", help="JSON, or durations such as 15m; FIELD= takes it back."),
    ] = None,
    if_match: IfMatch = None,
) -> None:
    """Show a function's policy, or change it: `garnish policy summarize max_concurrency=8 idle_ttl=15m warm=`."""
    import msgspec

    changes = dict(_field(text) for text in fields or ())
    screen = output.screen()
    with service.client(service.tenant) as client:
        found = client.set_policy(name, changes, if_match) if changes else client.function(name)
    for field, value in found.policy.items():
        screen.line(f"{field}: {msgspec.json.encode(value).decode()}")
    if not found.policy:
        screen.note("the service's defaults hold")
    screen.result(found.policy)


def _field(text: str) -> tuple[str, Any]:
    """Returns a field with its value; None: it is taken back. Raises typer.BadParameter."""
    import msgspec

    from garnish.sizes import parse_seconds, parse_whole_seconds

    field, equals, written = text.partition("=")
    if not field or not equals:
        raise typer.BadParameter(f"{text!r}: expected FIELD=VALUE, such as max_concurrency=8")
    if not written:
        return field, None
    try:
        if field in DURATIONS and written != "null":
            return field, parse_seconds(written)
        value = msgspec.json.decode(written)
        for window in value if field == "warm" and isinstance(value, list) else ():
            if isinstance(window, dict) and isinstance(window.get("for"), str):
                window["for"] = parse_whole_seconds(window["for"])
        return field, value
    except msgspec.DecodeError:
        return field, written  # a word such as strict
    except ValueError as error:
        raise typer.BadParameter(f"{field}: {error}") from None
