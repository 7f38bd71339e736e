"""A checked call: prompt as tokens, sampling with all defaults filled in, ready to be sent to a node."""

from __future__ import annotations

import hashlib
import secrets
import time
from functools import partial

import msgspec
from starlette.types import Receive

from adapters.functions import Defaults
from adapters.slo import lower_class
from cluster.errors import ServiceError
from cluster.limits import Call
from cluster.messages import GenerateRequest, Sampling
from gateway.admission import call_of
from gateway.functions import Target
from gateway.prompts import Source, tokens_of
from gateway.services import Services
from gateway.stopwatch import Stopwatch
from gateway.usage.counts import BASE
from gateway.usage.meter import Meter

DEFAULT_MAX_TOKENS = 256
GREEDY_BELOW = 1e-4
"""A temperature under this divides logits into infinities; it means greedy."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What a call states of its own; None where it states nothing."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: list[str] | str | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    ignore_eos: bool | None = None
    logprobs: int | None = None
    timeout: float | None = None
    max_tokens_field: str = "max_tokens"
    """How the caller calls it."""


class Invocation(msgspec.Struct, frozen=True):
    """One call; `requests` holds one entry per choice."""

    id: str
    tenant: str
    target: Target
    requests: list[GenerateRequest]
    received: float
    """Monotonic seconds at which the request's headers were there."""
    steps: dict[str, float]
    """Seconds of the steps before placement, for Server-Timing."""
    call: Call
    """What it takes of the tenant's and the function's limits."""
    meter: Meter
    request_id: str = ""
    """As in `x-request-id`."""


def new_id() -> str:
    return f"inv_{secrets.token_hex(12)}"


async def prepare(
    services: Services,
    *,
    tenant: str,
    target: Target,
    source: Source,
    options: Options,
    watch: Stopwatch,
    receive: Receive,
    choices: int = 1,
    request_id: str = "",
) -> Invocation:
    """`receive` must have given the whole body. Raises ServiceError (`validation_failed` when prompt and `max_tokens`
    don't fit the context, or when it has more choices than may run at once), ClientGone."""
    invocation_id = new_id()
    merged = merge(options, target.defaults)
    context = await _context(services)
    deadline = watch.received + _timeout(services, options, target)
    prompts = await tokens_of(source, services.text, services.text_threads, context, deadline, receive)
    timeout = deadline - time.monotonic()
    seed = secrets.randbits(63) if merged.seed is None else merged.seed
    account = await services.callers.account(tenant)
    slo = account.slo
    requests = [
        GenerateRequest(
            id=f"{invocation_id}-{index * choices + choice}",
            base=services.base.fingerprint,
            tenant=tenant,
            token_ids=tokens,
            max_tokens=_max_tokens(merged, options.max_tokens, len(tokens), context, source.field),
            sampling=_sampling(merged, seed, choice),
            timeout=max(timeout, 0.001),
            adapter=target.adapter,
            stop=_stops(merged.stop),
            ignore_eos=bool(merged.ignore_eos),
            function=_opaque(target),
            weight=account.weight,
            slo_class=lower_class(slo.slo_class, target.slo_class or slo.slo_class),
            ttft=_seconds(slo.ttft_ms),
            tpot=_seconds(slo.tpot_ms),
        )
        for index, tokens in enumerate(prompts)
        for choice in range(choices)
    ]
    call = call_of(tenant, account.limits, target.function, target.max_concurrency, requests)
    watch.lap("tokenize")
    version = BASE if target.version is None else str(target.version)
    meter = Meter(len(requests), partial(services.usage.add, tenant, target.function, version))
    steps = dict(watch.steps)
    return Invocation(invocation_id, tenant, target, requests, watch.received, steps, call, meter, request_id)


def merge(options: Options, defaults: Defaults) -> Options:
    """The call's own values, then the function's."""
    unset = {name: getattr(defaults, name) for name in defaults.__struct_fields__ if getattr(options, name) is None}
    return msgspec.structs.replace(options, **unset)


async def _context(services: Services) -> int:
    """Tokens that prompt and output may have together on the roomiest node that serves now.

    While none does, the base's own: placement then answers that the call may be tried again.
    """
    longest = (await services.cluster.table()).serving(services.base.fingerprint).longest
    # A node that is starting tells no context yet: its 0 must not refuse anything.
    return min(services.base.max_context, longest or services.base.max_context)


def _max_tokens(merged: Options, stated: int | None, prompt: int, context: int, prompt_field: str) -> int:
    left = context - prompt
    if left < 1:
        raise ServiceError(
            "validation_failed",
            f"the prompt has {prompt} tokens, and prompt and output together may have {context}",
            param=prompt_field,
        )
    if stated is not None and stated > left:
        raise ServiceError(
            "validation_failed",
            f"max_tokens is {stated}, but the prompt of {prompt} tokens leaves {left} of the context of {context}",
            param=merged.max_tokens_field,
        )
    return min(merged.max_tokens or DEFAULT_MAX_TOKENS, left)


def _timeout(services: Services, options: Options, target: Target) -> float:
    stated = options.timeout
    if stated is not None and stated > services.config.max_timeout:
        limit = services.config.max_timeout
        raise ServiceError("validation_failed", f"timeout may be at most {limit:g} s here", param="timeout")
    return stated or target.timeout or services.config.request_timeout


def _sampling(merged: Options, seed: int, choice: int) -> Sampling:
    temperature = 1.0 if merged.temperature is None else merged.temperature
    return Sampling(
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_p=1.0 if merged.top_p is None else merged.top_p,
        top_k=merged.top_k or 0,
        min_p=merged.min_p or 0.0,
        seed=seed,
        choice=choice,
        presence_penalty=merged.presence_penalty or 0.0,
        frequency_penalty=merged.frequency_penalty or 0.0,
        logprobs=merged.logprobs,
    )


def _stops(stop: list[str] | str | None) -> list[str]:
    return [stop] if isinstance(stop, str) else list(stop or [])


def _opaque(target: Target) -> str:
    """The function's name as nodes know it: it tells only which calls are of one function."""
    return "" if target.adapter is None else hashlib.blake2b(target.function.encode(), digest_size=8).hexdigest()


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
