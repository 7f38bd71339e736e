"""`garnish invoke`: one call, streamed or not, with the durations of its phases on request."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from garnish.cli.options import Output, TenantService
from garnish.screen import Screen

if TYPE_CHECKING:
    from garnish.client import Client
    from gateway.api.schema import ColdStartTiming, DoneEvent, InvokeReply


def invoke(
    service: TenantService,
    output: Output,
    name: Annotated[str, typer.Argument(help="NAME, NAME:ALIAS or NAME:VERSION.")],
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    stream: Annotated[bool, typer.Option("--stream", help="Print tokens as they come.")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a user's message (chat template).")] = False,
    later: Annotated[bool, typer.Option("--async", help="Don't wait: print the id for `garnish events`.")] = False,
    timing: Annotated[bool, typer.Option("--timing", help="Show where the time went.")] = False,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option("--top-p")] = None,
    top_k: Annotated[int | None, typer.Option("--top-k")] = None,
    min_p: Annotated[float | None, typer.Option("--min-p")] = None,
    seed: Annotated[int | None, typer.Option("--seed")] = None,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="May be given several times.")] = None,
    timeout: Annotated[float | None, typer.Option("--timeout", help="Seconds.")] = None,
) -> None:
    """Call a function with a prompt."""
    text = sys.stdin.read() if prompt == "-" else prompt
    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
        "stop": stop or None,
        "timeout": timeout,
    }
    sent = [{"role": "user", "content": text}] if chat else text
    screen = output.screen()
    if later and (stream or timing):
        raise typer.BadParameter("--async has neither a stream nor a timing to show")
    with service.client(service.tenant) as client:
        if later:
            return _submitted(client, screen, name, sent, options)
        reply = (_streamed if stream else _unstreamed)(client, screen, name, sent, options)
    if timing:
        _show_timing(screen, reply)
    return None


def _submitted(client: Client, screen: Screen, name: str, prompt: Any, options: dict[str, Any]) -> None:
    event = client.submit(name, prompt, **options)
    screen.line(event.id)
    screen.result(event)


def _unstreamed(client: Client, screen: Screen, name: str, prompt: Any, options: dict[str, Any]) -> InvokeReply:
    reply = client.invoke(name, prompt, stream=False, **options)
    screen.line(reply.output.text)
    screen.result(reply)
    return reply


def _streamed(client: Client, screen: Screen, name: str, prompt: Any, options: dict[str, Any]) -> DoneEvent:
    """Prints a streamed call's text as it arrives, or one event per line with --json. Returns the last event."""
    from gateway.api.schema import TokenEvent

    for event in client.invoke(name, prompt, stream=True, **options):
        screen.result(event)
        if not isinstance(event, TokenEvent):
            screen.line()
            return event
        if not screen.as_json:
            screen.piece(event.text)
    raise AssertionError("a stream ends with `done` or raises")


def _show_timing(screen: Screen, reply: InvokeReply | DoneEvent) -> None:
    timing, cold = reply.timing, reply.timing.cold_start
    rows = [
        ["queue", _ms(timing.queue_ms)],
        ["cold start", f"{cold.state} ({cold.plan}), load {_ms(cold.load_ms)}, exposed {_ms(cold.exposed_ms)}"],
        *_phases(cold),
        ["first token", _ms(timing.ttft_ms)],
        ["per token", _ms(timing.tpot_ms)],
        ["total", _ms(timing.total_ms)],
        ["tokens", f"{reply.usage.prompt_tokens} in, {reply.usage.completion_tokens} out"],
        ["finish", reply.output.finish_reason],
    ]
    if not screen.as_json:
        for name, value in rows:
            screen.notice(f"{name}: {value}")


def _phases(cold: ColdStartTiming) -> list[list[str]]:
    """Returns table rows with the phases of a cold start: the load of an adapter that was not on the device."""
    rows = []
    if cold.fetch_ms:
        rows.append(["  from the store", _ms(cold.fetch_ms)])
    if cold.layers_cpu or cold.layers_device:
        where = f"{cold.layers_cpu} on CPU workers, {cold.layers_device} on the device"
        rows.append(["  layers begun early", f"{where}; exposed as planned {_ms(cold.forecast_ms)}"])
    if cold.replays:
        rows.append(["  computed again", f"{cold.replays} chunks, for a CPU worker failed"])
    return rows


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} ms"
