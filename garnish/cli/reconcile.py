"""`garnish deploy -f serverless.yml`: shows what would change, asks, and changes it."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from garnish.cli.options import open_client

if TYPE_CHECKING:
    from garnish.reconcile import Plan
    from garnish.screen import Screen
    from gateway.routes.deploy import DeployReply


def deploy_file(file: Path, url: str | None, state: Path, screen: Screen, *, dry_run: bool, yes: bool) -> None:
    """Raises FrontDoorError."""
    from garnish.config import load_service_file
    from garnish.connection import find_connection
    from garnish.reconcile import carry_out, make_plan, try_out
    from garnish.sizes import shown_bytes

    service = load_service_file(file)
    administers = find_connection(url, None, os.environ, state=state, admin=True).key.startswith("gak_")

    connect = partial(open_client, url, state)
    screen.progress("comparing the file with the service")
    plan = make_plan(service, connect, administers=administers)
    screen.end_progress()
    for step in plan.steps:
        screen.line(str(step))
    if dry_run:
        for reply in try_out(plan, connect, screen.progress):
            _warn(reply, screen)
        screen.end_progress()
    if dry_run or not plan.changes:
        screen.result({"plan": plan, "deployed": []})
        return
    _ask(plan, screen, yes)
    deployed = []
    for reply in carry_out(plan, connect, screen.progress):
        screen.end_progress()
        rank = max(reply.ranks, default=0)
        screen.line(f"{reply.function}: version {reply.version}, rank {rank}, {shown_bytes(reply.bytes)}")
        _warn(reply, screen)
        deployed.append(reply)
    screen.result({"plan": plan, "deployed": deployed})


def _warn(reply: DeployReply, screen: Screen) -> None:
    for warning in reply.warnings:
        screen.note(f"warning: {reply.function}: {warning}")


def _ask(plan: Plan, screen: Screen, yes: bool) -> None:
    """Raises FrontDoorError when there is nobody to ask, Exit when the answer is no."""
    from garnish.errors import FrontDoorError

    if yes:
        return
    if screen.as_json or not sys.stdin.isatty():
        raise FrontDoorError(f"{plan.changes} changes are planned and nobody can be asked: say --yes (or --dry-run)")
    if not typer.confirm(f"carry out {plan.changes} changes?", err=True):
        raise typer.Exit(1)
