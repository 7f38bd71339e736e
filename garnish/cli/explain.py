"""`garnish explain`: how a call was placed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from garnish.cli.options import DEFAULT_STATE, AsJson, State, Tenant, Url, open_client

if TYPE_CHECKING:
    from garnish.screen import Screen
    from gateway.explain_schema import ExplainedPlacement
    from gateway.scheduling.decision import Candidate

RequestId = Annotated[str, typer.Argument(help="The call's id, or the x-request-id of its reply.")]
Admin = Annotated[bool, typer.Option("--admin", help="Any tenant's call, with the admin key of the state.")]

TERMS = ("prefill", "exposed_load", "decode", "wait", "ttft", "step", "spreading", "total")
"""Columns of times, in milliseconds."""


def register(app: typer.Typer) -> None:
    app.command()(explain)


def explain(
    request_id: RequestId,
    admin: Admin = False,
    url: Url = None,
    state: State = DEFAULT_STATE,
    tenant: Tenant = None,
    as_json: AsJson = False,
) -> None:
    """Show how a call was placed: the nodes that could have served it, what was forecast of each, the choice."""
    from garnish.operate import explain_call
    from garnish.screen import Screen
    from gateway.explain_schema import ExplainReply

    if admin and tenant is not None:
        raise typer.BadParameter("expected --tenant or --admin, not both")
    screen = Screen(as_json)
    with open_client(url, state, tenant, admin=admin) as client:
        told = client.ask(explain_call(request_id), ExplainReply)
    screen.line(f"{told.id} ({told.tenant}/{told.function}), request {told.request_id}")
    for placement in told.placements:
        _show(screen, placement)
    if told.left_out:
        screen.line(f"{told.left_out} more placements were not kept")
    screen.result(told)


def _show(screen: Screen, placement: ExplainedPlacement) -> None:
    made = placement.decision
    where = f"on {made.node}" if made.node is not None else made.outcome
    promised = ", ".join(
        f"{name} {value * 1000:.0f} ms"
        for name, value in (("ttft", made.ttft), ("tpot", made.tpot))
        if value is not None
    )
    screen.line(
        f"{placement.request}: {where}, by {made.policy} in {made.took * 1000:.2f} ms and {made.tries} tries; "
        f"{made.prompt_tokens} tokens, about {made.expected_tokens:.0f} expected, rank {made.rank}, {made.slo_class}"
        + (f" ({promised})" if promised else "")
    )
    if made.excluded:
        screen.line(f"not again: {', '.join(made.excluded)}")
    columns = [
        "",
        "NODE",
        "TIER",
        "RUNNING",
        "QUEUED",
        "RESERVED",
        *(f"{name.upper()} MS" for name in TERMS),
        "AGE",
        "NOTE",
    ]
    screen.table(columns, [_row(candidate) for candidate in made.candidates])
    if made.more:
        screen.line(f"and {made.more} more candidates")


def _row(candidate: Candidate) -> list[str]:
    notes = list(candidate.broken)
    if candidate.model_problem:
        notes.append(f"its performance model is not used: {candidate.model_problem}")
    elif candidate.model == "assumed":
        notes.append("not measured")
    return [
        "*" if candidate.chosen else "",
        candidate.node,
        candidate.tier,
        *(str(count) for count in (candidate.running, candidate.queued, candidate.reserved)),
        *(_milliseconds(getattr(candidate, name)) for name in TERMS),
        "-" if candidate.age is None else f"{candidate.age:.2f} s",
        "; ".join(notes),
    ]


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.3g}"
