"""`garnish explain`: shows how a call was routed to a node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from garnish.cli.options import TableOutput, TenantService
from garnish.screen import Column, Screen

if TYPE_CHECKING:
    from gateway.calls.explanations import ExplainedDecision
    from gateway.scheduling.decision import Candidate, Decision

RequestId = Annotated[str, typer.Argument(help="The call's id, or the x-request-id of its reply.")]
Admin = Annotated[bool, typer.Option("--admin", help="Any tenant's call, with the admin key of the state.")]

TERMS = {
    "prefill": 4,
    "exposed_load": 3,
    "decode": 7,
    "wait": 2,
    "ttft": 0,
    "step": 5,
    "spreading": 8,
    "total": 0,
}
"""Columns of times in milliseconds, with their order of removal on a narrow terminal.

The column with the highest number is left out first; 0 is never left out.
"""


def explain(service: TenantService, output: TableOutput, request_id: RequestId, admin: Admin = False) -> None:
    """Show how a call was routed: the candidate nodes, the forecast for each, and the choice."""
    from garnish.calls import explain_call
    from gateway.calls.explanations import ExplainReply

    if admin and service.tenant is not None:
        raise typer.BadParameter("expected --tenant or --admin, not both")
    screen = output.screen()
    with service.client(service.tenant, admin=admin) as client:
        reply = client.ask(explain_call(request_id), ExplainReply)
    screen.line(f"{reply.id} ({reply.tenant}/{reply.function}), request {reply.request_id}")
    for explained in reply.decisions:
        _show(screen, explained)
    if reply.left_out:
        screen.line(f"{reply.left_out} more decisions were not kept")
    screen.result(reply)


def _show(screen: Screen, explained: ExplainedDecision) -> None:
    decision = explained.decision
    where = f"on {decision.node}" if decision.node is not None else decision.outcome
    promised = ", ".join(
        f"{name} {value * 1000:.0f} ms"
        for name, value in (("ttft", decision.ttft), ("tpot", decision.tpot))
        if value is not None
    )
    screen.line(
        f"{explained.request}: {where}, by {decision.policy} in {decision.took * 1000:.2f} ms and "
        f"{decision.tries} tries; {decision.prompt_tokens} tokens, about {decision.expected_tokens:.0f} expected, "
        f"rank {decision.rank}, {decision.slo_class}" + (f" ({promised})" if promised else "")
    )
    if decision.excluded:
        screen.line(f"not again: {', '.join(decision.excluded)}")
    screen.line("forecasts in milliseconds:")
    screen.table(_columns(), [_row(candidate) for candidate in decision.candidates])
    if decision.more:
        screen.line(f"and {decision.more} more candidates")
    for candidate in decision.candidates:
        if candidate.chosen and candidate.ttft is not None:
            screen.line(in_words(candidate, decision))


def in_words(candidate: Candidate, decision: Decision) -> str:
    """Returns the parts of a candidate's total time as text, in milliseconds."""
    there, ms = candidate.running + candidate.queued + candidate.reserved, _milliseconds
    prefill, exposed, decode = candidate.prefill or 0.0, candidate.exposed_load or 0.0, candidate.decode or 0.0
    ttft, step = candidate.ttft or 0.0, candidate.step or 0.0
    others_ms = there * (prefill / decision.expected_tokens + decode)
    text = (
        f"{candidate.node}: it waits {ms(candidate.wait)} ms to start, its prompt adds {ms(prefill)} ms, its "
        f"adapter {ms(exposed)} ms: a first token after {ms(ttft)} ms. Every token gets "
        f"{decision.expected_inverse:.3g} of that ({ms(ttft * decision.expected_inverse)} ms) and a step of {ms(step)} "
        f"ms. The {there} requests there pay {ms(others_ms)} ms a token between them"
    )
    if candidate.spreading:
        copy = (there + 1) * candidate.spreading / decision.expected_tokens
        text += f"; one more copy of the adapter displaces another ({ms(candidate.spreading)} ms): {ms(copy)} ms"
    return text + (f". Total {ms(candidate.total)} ms" if candidate.total is not None else "")


def _columns() -> list[Column]:
    return [
        Column(""),
        Column("NODE", min_width=12),
        Column("TIER"),
        Column("RUNNING", number=True, spare=1),
        Column("QUEUED", number=True, spare=1),
        Column("RESERVED", number=True, spare=9),
        *(Column(_title(name), number=True, spare=spare) for name, spare in TERMS.items()),
        Column("AGE", number=True, spare=6),
        Column("NOTE", min_width=24),
    ]


def _title(term: str) -> str:
    return term.removeprefix("exposed_").upper()


def _row(candidate: Candidate) -> list[str]:
    notes = list(candidate.broken)
    if candidate.model_problem:
        notes.append(f"no forecast: its performance model is not used: {candidate.model_problem}")
    elif candidate.model == "assumed":
        notes.append("no forecast: its performance model is not measured yet")
    if candidate.widened:
        notes.append("its forecasts have been inaccurate for a minute, and refuse no requests")
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
