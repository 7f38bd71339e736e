"""Formats the native reply of an invocation: body, headers, and events of a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import cast

import msgspec

from cluster.errors import ServiceError
from cluster.messages import Done, GenerateRequest, Token, TokenLogprob
from gateway.api import schema
from gateway.calls.dispatch import Generation, events_of
from gateway.calls.request import Invocation
from gateway.http.errors import native_body
from gateway.http.event_stream import sse


class Outcome(msgspec.Struct):
    """Result of a completed generation."""

    text: str
    logprobs: list[TokenLogprob]
    done: Done
    prompt_logprobs: list[TokenLogprob] = []
    pieces: list[tuple[str, int]] = []
    """Parts of the text as they came, each with its number of tokens."""
    reasoning_tokens: int = 0
    """Number of tokens of reasoning, once it was separated."""
    token_ids: list[int] = []
    """Ids of the generated tokens."""


async def collect(generations: Sequence[Generation]) -> list[Outcome]:
    """Runs all generations and returns their outcomes. Raises the first ServiceError and cancels the others."""
    pieces: list[list[tuple[str, int]]] = [[] for _ in generations]
    logprobs: list[list[TokenLogprob]] = [[] for _ in generations]
    token_ids: list[list[int]] = [[] for _ in generations]
    ends: dict[int, Done] = {}
    async with events_of(generations) as events:
        async for index, event in events:
            if isinstance(event, Done):
                ends[index] = event
                pieces[index].append((event.text, 0))
            else:
                pieces[index].append((event.text, len(event.token_ids)))
                logprobs[index] += event.logprobs
                token_ids[index] += event.token_ids
    if len(ends) != len(generations):
        raise ServiceError("node_failed", "the node's stream ended without a result")
    return [
        Outcome(
            "".join(text for text, _ in pieces[index]),
            logprobs[index],
            ends[index],
            generation.prompt_logprobs,
            pieces[index],
            token_ids=token_ids[index],
        )
        for index, generation in enumerate(generations)
    ]


def invoke_reply(generations: Sequence[Generation], outcomes: Sequence[Outcome]) -> schema.InvokeReply:
    invocation = generations[0].invocation
    outputs = [_output(invocation, *numbered) for numbered in enumerate(outcomes)]
    return schema.InvokeReply(
        id=invocation.id,
        function=invocation.target.function,
        version=invocation.target.version,
        digest=invocation.target.digest,
        output=outputs[0],
        usage=usage([outcome.done for outcome in outcomes]),
        timing=timing(generations, outcomes[0].done),
        outputs=outputs if len(outputs) > 1 else None,
    )


def _output(invocation: Invocation, index: int, outcome: Outcome) -> schema.Output:
    request, echo = invocation.requests[index], invocation.echo_of(index)
    return schema.Output(
        text=(echo.text if echo else "") + outcome.text,
        finish_reason=cast(schema.FinishReason, outcome.done.finish_reason),
        logprobs=None if request.sampling.logprobs is None else [logprob(entry) for entry in outcome.logprobs],
        prompt_logprobs=_prompt_logprobs(request, outcome.prompt_logprobs),
        stop_reason=outcome.done.stop_reason,
        token_ids=outcome.token_ids if invocation.returns_token_ids else None,
        prompt_token_ids=request.token_ids if invocation.returns_token_ids else None,
    )


def _prompt_logprobs(request: GenerateRequest, entries: list[TokenLogprob]) -> list[schema.PromptLogprob | None] | None:
    if request.sampling.prompt_logprobs is None:
        return None
    return [None, *msgspec.convert(entries, list[schema.PromptLogprob], from_attributes=True)]


async def invoke_events(generations: Sequence[Generation]) -> AsyncGenerator[bytes, None]:
    """Yields the native stream: `token` events, then `done`. Raises ServiceError."""
    unbegun = set(range(len(generations)))
    several = len(generations) > 1
    async with events_of(generations) as events:
        async for index, event in events:
            choice = index if several else None
            if index in unbegun:
                unbegun.discard(index)
                first = _prompt_event(index, generations[index], choice)
                if first is not None:
                    yield sse(first, "token")
            for item in token_events(event, choice):
                yield sse(item, "token")
    yield sse(_done_event(generations), "done")


def _prompt_event(index: int, generation: Generation, choice: int | None) -> schema.TokenEvent | None:
    """Returns the event with the prompt's text, log probabilities and token ids, which precedes the first token.
    Returns None if none of them was requested."""
    echo = generation.invocation.echo_of(index)
    logprobs = _prompt_logprobs(generation.request, generation.prompt_logprobs)
    token_ids = generation.request.token_ids if generation.invocation.returns_token_ids else None
    if echo is None and logprobs is None and token_ids is None:
        return None
    return schema.TokenEvent(
        text=echo.text if echo else "",
        index=0,
        token_id=None,
        choice=choice,
        prompt_logprobs=logprobs,
        prompt_token_ids=token_ids,
    )


def token_events(event: Token | Done, choice: int | None = None) -> list[schema.TokenEvent]:
    """Returns one event per token in `event`. The last of them has the text of all. For a Done it returns one event if
    the Done has text, else none."""
    ids = [] if isinstance(event, Done) else event.token_ids
    if isinstance(event, Done) or not ids:
        index = event.completion_tokens if isinstance(event, Done) else event.index
        return [schema.TokenEvent(text=event.text, index=index, token_id=None, choice=choice)] if event.text else []
    last = len(ids) - 1
    return [
        schema.TokenEvent(
            text=event.text if offset == last else "",
            index=event.index + offset,
            token_id=token_id,
            logprob=logprob(event.logprobs[offset]) if offset < len(event.logprobs) else None,
            choice=choice,
        )
        for offset, token_id in enumerate(ids)
    ]


def invoke_failure(error: ServiceError, request_id: str) -> bytes:
    return sse(native_body(error, request_id), "error")


def _done_event(generations: Sequence[Generation]) -> schema.DoneEvent:
    ends = [generation.done for generation in generations if generation.done is not None]
    if len(ends) < len(generations):
        raise ServiceError("node_failed", "the node's stream ended without a result")
    outputs = [
        schema.FinishedOutput(cast(schema.FinishReason, done.finish_reason), stop_reason=done.stop_reason)
        for done in ends
    ]
    first, invocation = generations[0], generations[0].invocation
    return schema.DoneEvent(
        id=invocation.id,
        function=invocation.target.function,
        version=invocation.target.version,
        digest=invocation.target.digest,
        output=outputs[0],
        usage=usage(ends),
        timing=timing(generations, ends[0]),
        node=first.node,
        cold_start=first.cold_start,
        server_timing=server_timing(first),
        outputs=outputs if len(outputs) > 1 else None,
    )


def logprob(entry: TokenLogprob) -> schema.Logprob:
    return msgspec.convert(entry, schema.Logprob, from_attributes=True)


def usage(ends: Sequence[Done]) -> schema.Usage:
    """Returns the usage of all choices of one prompt; the prompt counts once."""
    return schema.Usage(
        prompt_tokens=ends[0].prompt_tokens,
        completion_tokens=sum(done.completion_tokens for done in ends),
        cached_tokens=ends[0].cached_tokens,
    )


def timing(generations: Sequence[Generation], done: Done) -> schema.Timing:
    """Returns the timing of a call. `done`: end of the first generation."""
    times, cold = generations[0].times, done.timing.cold_start
    ends = [each.times.done_at for each in generations if each.times.done_at is not None]
    return schema.Timing(
        queue_ms=_ms(done.timing.queue),
        cold_start=schema.ColdStartTiming(
            state=cast(schema.Tier, cold.state),
            plan=cold.plan,
            load_ms=_ms(cold.load),
            exposed_ms=_ms(cold.exposed),
            fetch_ms=_ms(cold.fetch),
            layers_cpu=cold.layers_cpu,
            layers_device=cold.layers_device,
            replays=cold.replays,
            forecast_ms=_ms(cold.forecast),
        ),
        ttft_ms=None if times.ttft is None else _ms(times.ttft),
        tpot_ms=None if times.tpot is None else _ms(times.tpot),
        total_ms=_ms(max(ends) - times.received),
        resumed=max(each.resumed for each in generations),
        device_ms=_ms(sum(each.done.timing.device for each in generations if each.done is not None)),
    )


def invocation_headers(generation: Generation) -> dict[str, str]:
    """Returns the headers about the invocation that are known when the reply begins."""
    target = generation.invocation.target
    headers = {"x-garnish-function": target.function, "server-timing": server_timing(generation)}
    if target.version is not None:
        headers["x-garnish-version"] = str(target.version)
    if generation.node is not None:
        headers["x-garnish-node"] = generation.node
    if generation.cold_start is not None:
        headers["x-garnish-cold-start"] = generation.cold_start
    return headers


def server_timing(generation: Generation) -> str:
    """Returns the value of the header Server-Timing, in milliseconds. It has the node's measurements if they have
    arrived, else the gateway's."""
    done, times = generation.done, generation.times
    steps = {**generation.invocation.steps, "schedule": times.schedule}
    if times.hold_wait:
        steps = {"hold": times.hold_wait, **steps}
    if done is not None:
        cold = done.timing.cold_start
        steps |= {
            "queue": done.timing.queue,
            "fetch": cold.fetch,
            "load": cold.load,
            "exposed": cold.exposed,
            "prefill": done.timing.prefill,
        }
        steps["decode"] = max(0.0, done.timing.total - done.timing.queue - done.timing.prefill)
    else:
        if times.sent_at is not None and times.started_at is not None:
            steps["queue"] = times.started_at - times.sent_at
        if times.started_at is not None and times.first_at is not None:
            steps["prefill"] = times.first_at - times.started_at
    entries = [f"{name};dur={seconds * 1000:.2f}" for name, seconds in steps.items()]
    if done is not None and done.timing.cold_start.plan != "none":
        cold = done.timing.cold_start
        layers = f"{cold.layers_cpu} layers on CPU workers and {cold.layers_device} on the device"
        entries.append(f'cold;desc="{cold.plan}: {layers}; {cold.replays} replays"')
    return ", ".join(entries)


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
