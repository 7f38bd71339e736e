"""`garnish deploy -f serverless.yml`: shows what would change, asks, and changes it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from garnish.cli.options import Service, ask

if TYPE_CHECKING:
    from garnish.screen import Screen
    from gateway.routes.deploy import DeployReply


def deploy_file(file: Path, service: Service, screen: Screen, *, dry_run: bool, yes: bool) -> None:
    """Shows what a service file would change, asks, and changes it; with `dry_run` it has only the adapters checked,
    with `yes` nobody is asked. Raises FrontDoorError."""
    from garnish.config import load_service_file
    from garnish.connection import find_connection
    from garnish.reconcile import carry_out, make_plan, try_out
    from garnish.sizes import shown_bytes

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
        screen.line(f"{reply.function}: version {reply.version}, rank {rank}, {shown_bytes(reply.bytes)}")
        _warn(reply, screen)
        deployed.append(reply)
    screen.result({"plan": plan, "deployed": deployed})


def _warn(reply: DeployReply, screen: Screen) -> None:
    for warning in reply.warnings:
        screen.note(f"warning: {reply.function}: {warning}")
