"""What a caller reads about an invocation: the reply, its headers, the events of a stream."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import cast

from cluster.errors import ServiceError
from cluster.messages import Done, Token, TokenLogprob
from gateway import schema
from gateway.choices import Outcome, merged
from gateway.dispatch import Generation
from gateway.errors import native_body
from gateway.event_stream import sse
from gateway.invocation import Invocation


def invoke_reply(invocation: Invocation, generation: Generation, outcome: Outcome) -> schema.InvokeReply:
    wanted = generation.request.sampling.logprobs is not None
    return schema.InvokeReply(
        id=invocation.id,
        function=invocation.target.function,
        version=invocation.target.version,
        digest=invocation.target.digest,
        output=schema.Output(
            text=outcome.text,
            finish_reason=cast(schema.FinishReason, outcome.done.finish_reason),
            logprobs=[logprob(entry) for entry in outcome.logprobs] if wanted else None,
        ),
        usage=usage(outcome.done),
        timing=timing(generation, outcome.done),
    )


async def invoke_events(invocation: Invocation, generation: Generation) -> AsyncGenerator[bytes, None]:
    """The native stream: `token` events, then `done`. Raises ServiceError."""
    async with aclosing(merged([generation])) as events:
        async for _, event in events:
            if isinstance(event, Token):
                for item in token_events(event):
                    yield sse(item, "token")
                continue
            if event.text:
                yield sse(schema.TokenEvent(text=event.text, index=event.completion_tokens, token_id=None), "token")
            yield sse(_done_event(invocation, generation, event), "done")


def token_events(event: Token) -> list[schema.TokenEvent]:
    """One event per token; when several came at once, the last one carries their text."""
    last = len(event.token_ids) - 1
    if last < 0:
        return [schema.TokenEvent(text=event.text, index=event.index, token_id=None)] if event.text else []
    return [
        schema.TokenEvent(
            text=event.text if offset == last else "",
            index=event.index + offset,
            token_id=token_id,
            logprob=logprob(event.logprobs[offset]) if offset < len(event.logprobs) else None,
        )
        for offset, token_id in enumerate(event.token_ids)
    ]


def invoke_failure(error: ServiceError, request_id: str) -> bytes:
    return sse(native_body(error, request_id), "error")


def _done_event(invocation: Invocation, generation: Generation, done: Done) -> schema.DoneEvent:
    return schema.DoneEvent(
        id=invocation.id,
        function=invocation.target.function,
        version=invocation.target.version,
        digest=invocation.target.digest,
        output=schema.FinishedOutput(finish_reason=cast(schema.FinishReason, done.finish_reason)),
        usage=usage(done),
        timing=timing(generation, done),
        node=generation.node,
        cold_start=generation.cold_start,
        server_timing=server_timing(invocation, generation),
    )


def logprob(entry: TokenLogprob) -> schema.Logprob:
    top = [schema.Top(token=item.token, token_id=item.token_id, logprob=item.logprob) for item in entry.top]
    return schema.Logprob(token=entry.token, token_id=entry.token_id, logprob=entry.logprob, top=top)


def usage(done: Done) -> schema.Usage:
    return schema.Usage(
        prompt_tokens=done.prompt_tokens,
        completion_tokens=done.completion_tokens,
        cached_tokens=done.cached_tokens,
    )


def timing(generation: Generation, done: Done) -> schema.Timing:
    cold = done.timing.cold_start
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
        ttft_ms=None if generation.ttft is None else _ms(generation.ttft),
        tpot_ms=None if generation.tpot is None else _ms(generation.tpot),
        total_ms=_ms(time.monotonic() - generation.received),
    )


def invocation_headers(invocation: Invocation, generation: Generation) -> dict[str, str]:
    """As far as they are known when the reply begins."""
    headers = {"x-garnish-function": invocation.target.function, "server-timing": server_timing(invocation, generation)}
    if invocation.target.version is not None:
        headers["x-garnish-version"] = str(invocation.target.version)
    if generation.node is not None:
        headers["x-garnish-node"] = generation.node
    if generation.cold_start is not None:
        headers["x-garnish-cold-start"] = generation.cold_start
    return headers


def server_timing(invocation: Invocation, generation: Generation) -> str:
    """Steps in milliseconds. The node's own figures where it has told them, else what the gateway saw."""
    steps = {**invocation.steps, "schedule": generation.schedule}
    if generation.held:
        steps = {"hold": generation.held, **steps}
    done, sent, started, first = generation.done, generation.sent_at, generation.started_at, generation.first_at
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
        if sent is not None and started is not None:
            steps["queue"] = started - sent
        if started is not None and first is not None:
            steps["prefill"] = first - started
    told = [f"{name};dur={seconds * 1000:.2f}" for name, seconds in steps.items()]
    if done is not None and done.timing.cold_start.plan != "none":
        cold = done.timing.cold_start
        layers = f"{cold.layers_cpu} layers on CPU workers and {cold.layers_device} on the device"
        told.append(f'cold;desc="{cold.plan}: {layers}; {cold.replays} replays"')
    return ", ".join(told)


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
