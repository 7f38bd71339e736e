"""A checked call becomes an invocation: its target resolved, its prompt as tokens, all defaults filled in."""

from __future__ import annotations

import hashlib
import secrets
import time
from functools import partial

import msgspec
from starlette.requests import Request

from adapters.slo import Slo, lower_class
from adapters.tenants import Tenant
from cluster.messages import GenerateRequest
from gateway.api.schema import GenerationParams
from gateway.calls.admission import call_of
from gateway.calls.invocation import Echo, Invocation
from gateway.calls.parameters import (
    NodeParameters,
    check_prompt_logprobs,
    kept_tokens,
    max_tokens_of,
    merge,
    resolve,
)
from gateway.calls.prompts import (
    INLINE_CHARACTERS,
    Conversation,
    Prompts,
    RenderedConversation,
    Source,
    tokens_of,
)
from gateway.calls.template_process import Job
from gateway.catalog.functions import Target
from gateway.http.errors import invalid
from gateway.http.params import side
from gateway.http.stopwatch import Stopwatch
from gateway.services import Services
from gateway.usage.counts import BASE
from gateway.usage.meter import Meter

SPARE = Slo(slo_class="best_effort")
"""Of calls that run in what others leave."""


def spare_only(request: Request) -> bool:
    """Whether nobody waits for the call: it is one of a batch, or asynchronous. No header can say so."""
    return bool(getattr(request.state, "spare_only", False))


def new_id() -> str:
    return f"inv_{secrets.token_hex(12)}"


async def prepare(
    request: Request,
    services: Services,
    tenant: str,
    watch: Stopwatch,
    *,
    named: tuple[str, str | None],
    source: Source,
    stated: GenerationParams,
) -> Invocation:
    """Returns the call as nodes take it. `request` has given its whole body; `named`: a function's name and qualifier.

    Raises NotFound, ClientGone, ServiceError: `validation_failed` when prompt and `max_tokens` don't fit the context,
    when it has more choices than may run at once, or a parameter names what the base model has not.
    """
    target = await services.functions.target(tenant, *named, side(request))
    watch.lap("resolve")
    merged = merge(stated, target.policy.defaults)
    context = await served_context(services)
    deadline = watch.received + _timeout(services, stated, target)
    parameters = resolve(merged, services.text, services.base.vocab_size)
    keep = kept_tokens(merged, context)
    own = target.policy.defaults.chat_template
    source = await rendered(request, services, tenant=tenant, template=own, source=source, deadline=deadline)
    prompts = await tokens_of(source, services.text, services.text_threads, context, deadline, request.receive, keep)
    check_prompt_logprobs(merged, (merged.n or 1) * sum(map(len, prompts)))
    account = await services.callers.account(tenant)
    base, timeout = services.base.fingerprint, max(deadline - time.monotonic(), 0.001)
    if spare_only(request):
        account = msgspec.structs.replace(account, slo=SPARE)
    template = _template(base, target=target, account=account, parameters=parameters, timeout=timeout)
    limits = [max_tokens_of(merged, stated.limit, len(tokens), context, source.field) for tokens in prompts]
    requests = _requests(template, prompts, limits, merged.n or 1)
    call = call_of(account, target.function, target.policy.max_concurrency, requests, yields=spare_only(request))
    watch.lap("tokenize")
    version = BASE if target.version is None else str(target.version)
    return Invocation(
        id=template.id,
        tenant=tenant,
        target=target,
        requests=requests,
        received=watch.received,
        steps=dict(watch.steps),
        call=call,
        meter=Meter(len(requests), partial(services.usage.add, tenant, target.function, version)),
        request_id=request.state.request_id,
        choices=merged.n or 1,
        echo=await _echo(services, source, prompts, merged),
    )


async def rendered(
    request: Request, services: Services, *, tenant: str, template: str | None, source: Source, deadline: float
) -> Source:
    """Returns a conversation as a function's own chat template has it, and any other source as it is. Raises
    ServiceError, ClientGone."""
    if template is None or not isinstance(source, Conversation):
        return source
    job = Job(template, source.messages, dict(services.text.special), source.answer)
    text = await services.templates.render(tenant, job, deadline=deadline, receive=request.receive)
    return RenderedConversation(text)


def _template(
    base: str, *, target: Target, account: Tenant, parameters: NodeParameters, timeout: float
) -> GenerateRequest:
    """Returns a request with what all of a call's requests have in common; its id is the call's."""
    slo = account.slo
    return GenerateRequest(
        id=new_id(),
        base=base,
        tenant=account.id,
        token_ids=[],
        max_tokens=1,
        **parameters,
        timeout=timeout,
        adapter=target.adapter,
        function=_opaque(target),
        weight=account.weight,
        slo_class=lower_class(slo.slo_class, target.policy.slo_class or slo.slo_class),
        ttft=_seconds(slo.ttft_ms),
        tpot=_seconds(slo.tpot_ms),
        reserved=account.reserved.get(target.function, 0),
    )


def _requests(
    template: GenerateRequest, prompts: list[list[int]], limits: list[int], choices: int
) -> list[GenerateRequest]:
    """One per prompt and choice; `limits`: of each prompt, the most tokens of its outputs."""
    return [
        msgspec.structs.replace(
            template,
            id=f"{template.id}-{index * choices + choice}",
            token_ids=tokens,
            max_tokens=limit,
            sampling=msgspec.structs.replace(template.sampling, choice=choice),
        )
        for index, (tokens, limit) in enumerate(zip(prompts, limits, strict=True))
        for choice in range(choices)
    ]


async def _echo(services: Services, source: Source, prompts: list[list[int]], merged: GenerationParams) -> list[Echo]:
    """Returns the echo of each prompt; empty where nothing is to be echoed. Decodes long prompts in a thread."""
    if not merged.echoes or not isinstance(source, Prompts):
        return []
    text, own = services.text, source
    skip, truncated = merged.skip_special_tokens is not False, merged.truncate_prompt_tokens is not None

    def decode() -> list[Echo]:
        texts = own.texts(text, prompts, truncated=truncated, skip_special=skip)
        firsts = [text.tokenizer.decode(tokens[:1], skip_special_tokens=False) for tokens in prompts]
        return [Echo(*pair) for pair in zip(texts, firsts, strict=True)]

    return decode() if source.characters <= INLINE_CHARACTERS else await services.text_threads.run(decode)


async def served_context(services: Services) -> int:
    """Tokens that prompt and output may have together on the roomiest node that serves now.

    While none does, the base's own: placement then answers that the call may be tried again.
    """
    longest = (await services.cluster.table()).serving(services.base.fingerprint).longest
    # A node that is starting tells no context yet: its 0 must not refuse anything.
    return min(services.base.max_context, longest or services.base.max_context)


def _timeout(services: Services, stated: GenerationParams, target: Target) -> float:
    if stated.timeout is not None and stated.timeout > services.config.max_timeout:
        limit = services.config.max_timeout
        raise invalid("timeout", f"timeout may be at most {limit:g} s here")
    return stated.timeout or target.policy.timeout or services.config.request_timeout


def _opaque(target: Target) -> str:
    """The function's name as nodes know it: it tells only which calls are of one function."""
    return "" if target.adapter is None else hashlib.blake2b(target.function.encode(), digest_size=8).hexdigest()


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
