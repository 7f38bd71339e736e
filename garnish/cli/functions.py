"""`garnish deploy`, `list`, `describe` and `delete`: the commands for functions."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from garnish.cli.options import Output, Service, TableOutput, TenantService, Warm, ask
from garnish.errors import GarnishError
from garnish.screen import Column, Screen
from garnish.sizes import format_bytes, format_time

if TYPE_CHECKING:
    from garnish.client import Client
    from gateway.residency.messages import ForecastReply
    from gateway.routes.deploy import DeployReply
    from gateway.routes.functions import FunctionReply

Name = Annotated[str, typer.Argument(help="The function's name.")]


def deploy(
    service: TenantService,
    output: Output,
    name: Annotated[str | None, typer.Argument(help="The function's name.")] = None,
    path: Annotated[
        str | None, typer.Argument(help="The PEFT adapter's directory, hf:org/name, or an allowed s3://bucket/prefix.")
    ] = None,
    file: Annotated[Path | None, typer.Option("-f", "--file", help="Make the service hold what the file says.")] = None,
    alias: Annotated[str | None, typer.Option("--alias", help="The alias to move (default: latest).")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only validate; with -f: only show the plan.")] = False,
    warm: Warm = False,
    yes: Annotated[bool, typer.Option("--yes", help="With -f: carry out the plan without asking.")] = False,
) -> None:
    """Deploy an adapter as a function. With -f, reconcile tenants and functions with a service file."""
    if (file is None) == (name is None or path is None) or (
        file is not None and (name, alias, warm) != (None, None, False)
    ):
        raise typer.BadParameter("expected NAME PATH, or -f FILE")
    with output.screen() as screen:
        if file is not None:
            deploy_file(file, service, screen, dry_run=dry_run, yes=yes)
            return
        assert name is not None
        assert path is not None
        screen.progress(f"deploying {name}")
        with service.client(service.tenant) as client:
            reply = client.deploy(name, path, alias, dry_run, warm=warm)
        screen.end_progress()
        outcome = "valid" if dry_run else f"version {reply.version}"
        screen.line(f"{reply.function}: {outcome}, rank {max(reply.ranks, default=0)}, {format_bytes(reply.bytes)}")
        for warning in reply.warnings:
            screen.notice(f"warning: {warning}")
        screen.result(reply)


def deploy_file(file: Path, service: Service, screen: Screen, *, dry_run: bool, yes: bool) -> None:
    """Shows the changes that a service file requires, asks for confirmation, and carries them out.

    With `dry_run` the adapters are only validated. With `yes` there is no question. Raises FrontDoorError.
    """
    from garnish.config import load_service_file
    from garnish.credentials import find_connection
    from garnish.reconcile import carry_out, make_plan, try_out

    declared = load_service_file(file)
    administers = find_connection(service.url, None, os.environ, state=service.state, admin=True).key.startswith("gak_")
    screen.progress("comparing the file with the service")
    plan = make_plan(declared, service.client, administers=administers)
    screen.end_progress()
    for step in plan.steps:
        screen.line(str(step))
    if dry_run:
        for reply in try_out(plan, service.client, screen.progress):
            _warn(reply, screen)
        screen.end_progress()
    if dry_run or not plan.changes:
        screen.result({"plan": plan, "deployed": []})
        return
    if not yes:
        nobody = f"{plan.changes} changes are planned and nobody can be asked: say --yes (or --dry-run)"
        ask(f"carry out {plan.changes} changes?", screen, nobody)
    deployed = []
    for reply in carry_out(plan, service.client, screen.progress):
        screen.end_progress()
        rank = max(reply.ranks, default=0)
        screen.line(f"{reply.function}: version {reply.version}, rank {rank}, {format_bytes(reply.bytes)}")
        _warn(reply, screen)
        deployed.append(reply)
    screen.result({"plan": plan, "deployed": deployed})


def _warn(reply: DeployReply, screen: Screen) -> None:
    for warning in reply.warnings:
        screen.notice(f"warning: {reply.function}: {warning}")


def list_functions(service: TenantService, output: TableOutput) -> None:
    """List the tenant's functions."""
    screen = output.screen()
    with service.client(service.tenant) as client:
        page = client.functions()
        items = list(page.functions)
        while page.next is not None:
            page = client.functions(after=page.next)
            items += page.functions
    rows = [
        [
            item.name,
            "damaged"
            if item.error
            else ", ".join(f"{alias}={format_target(target)}" for alias, target in item.aliases.items()),
            str(max(item.ranks, default=0)),
            format_bytes(item.bytes),
            ", ".join(sorted({f"{place.node}:{place.tier}" for place in item.residency})) or "-",
        ]
        for item in items
    ]
    screen.table(
        [
            Column("NAME", min_width=20),
            Column("ALIASES", min_width=12),
            Column("RANK", number=True),
            Column("SIZE", number=True),
            Column("RESIDENT", min_width=16),
        ],
        rows,
    )
    if not rows:
        screen.notice("there are no functions yet: garnish deploy NAME DIRECTORY")
    screen.result({"functions": items, "next": None})


def describe(service: TenantService, output: TableOutput, name: Name) -> None:
    """Show one function: its aliases, its versions, and the nodes that have its adapters."""
    screen = output.screen()
    with service.client(service.tenant) as client:
        function, forecast = client.function(name), _forecast(client, name)
    screen.line(f"name: {function.name}")
    screen.line(f"generation: {function.generation}")
    for alias, target in function.aliases.items():
        screen.line(f"alias {alias}: {format_target(target)}")
    for field, value in function.policy.items():
        screen.line(f"policy {field}: {msgspec.json.encode(value).decode()}")
    screen.line(f"calls expected: {_expected(forecast)}")
    _show_versions(function, screen)
    screen.result(function)


def _forecast(client: Client, name: str) -> ForecastReply | None:
    """Returns the function's forecast, or None if the service's release has no forecasts."""
    try:
        return client.forecast(name)
    except GarnishError as error:
        if error.type != "not_found":
            raise
        return None


def _expected(forecast: ForecastReply | None) -> str:
    from gateway.residency.messages import WATCH_SECONDS

    if forecast is None or forecast.watched is None:
        return "not known"
    if forecast.chances is None:
        expected = "none of late" if forecast.watched > WATCH_SECONDS else "not known yet"
    else:
        expected = (
            f"{forecast.chances['within_30_s']:.0%} within 30 s, {forecast.chances['within_300_s']:.0%} within 5 min"
        )
    places = ", ".join(sorted({f"{place.node}:{place.tier} ({place.cause})" for place in forecast.wanted}))
    left_out = "".join(
        f"; not wanted on {each.node or 'any node'} ({each.cause}): {each.why}" for each in forecast.left_out
    )
    return f"{expected}; wanted on {places or 'no node'}{left_out}"


def _show_versions(function: FunctionReply, screen: Screen) -> None:
    rows = [
        [
            str(entry.version),
            str(max(entry.ranks, default=0)),
            ", ".join(entry.targets),
            format_bytes(entry.bytes),
            format_time(entry.created),
            ", ".join(f"{p.node}:{p.tier}" for p in function.residency if p.version == entry.version) or "-",
        ]
        for entry in function.versions
    ]
    screen.table(
        [
            Column("VERSION", number=True),
            Column("RANK", number=True),
            Column("TARGETS", min_width=12),
            Column("SIZE", number=True),
            Column("CREATED"),
            Column("RESIDENT", min_width=16),
        ],
        rows,
    )


def delete(
    service: TenantService,
    output: Output,
    name: Annotated[str, typer.Argument(help="The function's name, or NAME:VERSION.")],
    version: Annotated[int | None, typer.Option("--version", help="Delete only this version.", min=1)] = None,
    force: Annotated[bool, typer.Option("--force", help="Cancel running calls.")] = False,
) -> None:
    """Delete a function with all its versions, or one version that no alias points to."""
    name, version = _version_in(name, version)
    if version is not None and force:
        raise typer.BadParameter("--force is for a whole function")
    deleted = name if version is None else f"{name}:{version}"
    screen = output.screen()
    with service.client(service.tenant) as client:
        if version is None:
            client.delete(name, force)
        else:
            _delete_version(client, name, version)
    screen.line(f"{deleted}: deleted")
    screen.result({"deleted": deleted})


def _delete_version(client: Client, name: str, version: int) -> None:
    """Deletes the version. Raises GarnishError.

    If an alias points to the version, the message says what to do.
    """
    try:
        client.delete_version(name, version)
    except GarnishError as error:
        if error.type != "conflict":
            raise
        hint = f"{error.message} (garnish alias {name} ALIAS VERSION)"
        raise GarnishError(error.type, hint, request_id=error.request_id, status=error.status) from error


def _version_in(name: str, version: int | None) -> tuple[str, int | None]:
    """Returns the name and the version to delete; `teas:1` means the same as `teas --version 1`.

    Raises typer.BadParameter for an alias, such as `teas:prod`.
    """
    name, colon, suffix = name.partition(":")
    if not colon:
        return name, version
    if not (suffix.isascii() and suffix.isdecimal() and int(suffix)) or version is not None:
        raise typer.BadParameter(
            f"{suffix!r} is not a version: `garnish delete {name}:1` deletes version 1, `garnish delete {name}` "
            "deletes all of them; an alias stays as long as its function (garnish alias points it elsewhere)"
        )
    return name, int(suffix)


def format_target(target: int | dict[str, float]) -> str:
    """Returns an alias's target as text: `4`, or `3:0.9+4:0.1` for shares of the calls."""
    if isinstance(target, int):
        return str(target)
    return "+".join(f"{version}:{share:g}" for version, share in sorted(target.items(), key=lambda item: int(item[0])))
