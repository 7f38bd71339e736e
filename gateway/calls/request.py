"""Turns a checked call into an invocation. It resolves the target, tokenizes the prompt and fills in the defaults."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.types import Message

from adapters.base_model import BaseModel
from adapters.functions import Defaults, Policy
from adapters.slo import Slo, lower_class
from adapters.tenants import Tenant
from cluster.limits import Call
from cluster.messages import GenerateRequest
from cluster.state import ClusterState
from cluster.text import BaseText
from gateway.api.schema import GenerationParams
from gateway.calls.admission import call_of
from gateway.calls.chat_templates import ChatTemplates
from gateway.calls.grammars import GrammarChecks, StatedForm, form_of_answer
from gateway.calls.parameters import (
    NodeParameters,
    check_prompt_logprobs,
    kept_prompt_tokens,
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
from gateway.calls.tool_grammars import free_form
from gateway.catalog.callers import Callers
from gateway.catalog.functions import Functions, Target
from gateway.catalog.threads import LeavableThreads
from gateway.http.errors import invalid
from gateway.http.params import side
from gateway.http.stopwatch import Stopwatch
from gateway.usage.counts import BASE, UsageCounts
from gateway.usage.meter import Meter

BACKGROUND_SLO = Slo(slo_class="best_effort")
"""SLO of batches and asynchronous calls, which run in spare capacity."""


class Echo(msgspec.Struct, frozen=True):
    """Prompt that is echoed at the beginning of the text."""

    text: str
    first_token: str
    offsets: list[int] = []
    """Offsets of the prompt's tokens in the text, if log probabilities are requested."""


class Invocation(msgspec.Struct, frozen=True):
    """Call that is ready for nodes. `requests` has one entry per choice, grouped by prompt."""

    id: str
    tenant: str
    target: Target
    requests: list[GenerateRequest]
    received: float
    """Time at which the request's headers had arrived, in monotonic seconds."""
    steps: dict[str, float]
    """Duration of each step before routing, in seconds, for the header Server-Timing."""
    call: Call
    meter: Meter
    is_form: bool = False
    """True if the whole answer has a stated form, so that it has no free text."""
    request_id: str = ""
    choices: int = 1
    echo: list[Echo] = []
    returns_token_ids: bool = False
    """True: the reply has the ids of the tokens."""

    def echo_of(self, index: int) -> Echo | None:
        """Returns the echo of the request at `index`; None if nothing is echoed."""
        return self.echo[index // self.choices] if self.echo else None


@dataclass(frozen=True, kw_only=True)
class InputProcessor:
    """Turns calls into requests for nodes, in one gateway worker. Times are in seconds."""

    base: BaseModel
    text: BaseText
    text_threads: LeavableThreads
    grammars: GrammarChecks
    templates: ChatTemplates
    functions: Functions
    callers: Callers
    cluster: ClusterState
    request_timeout: float
    max_timeout: float
    count_usage: Callable[[str, str, str, UsageCounts], None]

    async def prepare(
        self,
        request: Request,
        tenant: str,
        watch: Stopwatch,
        *,
        function: tuple[str, str | None],
        source: Source,
        stated: GenerationParams,
    ) -> Invocation:
        """Returns the invocation of a call. `request` has returned its whole body. `function`: name and qualifier.

        Raises NotFound, ClientGone, ServiceError. `validation_failed` means that prompt and `max_tokens` do not fit the
        context, that more choices are requested than may run at once, or that a parameter is outside the base model's
        vocabulary.
        """
        _take_request_id(request, stated.request_id)
        target = await self.functions.target(tenant, *function, side(request))
        watch.lap("resolve")
        merged = merge(stated, target.policy.defaults)
        choices = merged.n or 1
        context = await self.served_context()
        deadline = watch.received + self._timeout(stated, target)
        form = form_of_answer(merged)
        parameters = resolve(merged, self.text, self.base.vocab_size)
        keep = kept_prompt_tokens(merged, context)
        source = await self.render(request, tenant, target.policy.defaults.chat_template, source, deadline)
        if stated.add_special_tokens is not None:
            source = source.with_special(stated.add_special_tokens)
        prompts = await tokens_of(source, self.text, self.text_threads, context, deadline, request.receive, keep)
        check_prompt_logprobs(merged, choices * sum(map(len, prompts)))
        checked = form or free_form(merged, target.policy.defaults, self.text, prompts[0])
        if checked is not None:
            await self._check_form(tenant, merged, checked, deadline)
            parameters["sampling"] = msgspec.structs.replace(parameters["sampling"], grammar=checked.grammar)
        account, in_background = await self.callers.account(tenant), is_background(request)
        if in_background:
            account = msgspec.structs.replace(account, slo=BACKGROUND_SLO)
        limits = [max_tokens_of(merged, stated.limit, len(tokens), context, source.field) for tokens in prompts]
        id, timeout = new_id(), max(deadline - time.monotonic(), 0.001)
        of_choices = ((*each, choice) for each in zip(prompts, limits, strict=True) for choice in range(choices))
        requests = [
            self._request(f"{id}-{number}", *each, target, account, parameters, timeout)
            for number, each in enumerate(of_choices)
        ]
        call = call_of(
            account,
            target.function,
            target.policy.max_concurrency,
            requests,
            yields=in_background,
            rate_taken=request.state.rate_taken if in_background else True,
        )
        watch.lap("tokenize")
        version = BASE if target.version is None else str(target.version)
        return Invocation(
            id=id,
            tenant=tenant,
            target=target,
            requests=requests,
            received=watch.received,
            steps=dict(watch.steps),
            call=call,
            meter=Meter(len(requests), partial(self.count_usage, tenant, target.function, version)),
            is_form=form is not None,
            request_id=request.state.request_id,
            choices=choices,
            echo=await self._echo(source, prompts, merged),
            returns_token_ids=bool(stated.return_token_ids),
        )

    async def check_form(self, tenant: str, call: GenerationParams) -> None:
        """Checks the form of answers that a call states, whatever its function. Raises ServiceError."""
        form = form_of_answer(call) or free_form(call, Defaults(), self.text, [])
        if form is not None:
            await self._check_form(tenant, call, form, time.monotonic() + self.request_timeout)

    async def _check_form(self, tenant: str, call: GenerationParams, form: StatedForm, deadline: float) -> None:
        if call.allowed_token_ids:
            why = f"allowed_token_ids can't be combined with {form.field}, which states the answer's form"
            raise invalid("allowed_token_ids", f"{why}; use one")
        await self.grammars.check(tenant, form, deadline)

    async def render(
        self, request: Request, tenant: str, template: str | None, source: Source, deadline: float
    ) -> Source:
        """Returns a conversation rendered by the function's own chat template; any other source is unchanged.

        Raises ServiceError, ClientGone.
        """
        if template is None or not isinstance(source, Conversation):
            return source
        job = Job(
            template,
            source.messages,
            dict(self.text.special),
            answer=source.answer,
            continues=source.continues,
            variables=source.variables,
        )
        text = await self.templates.render(tenant, job, deadline=deadline, receive=request.receive)
        return RenderedConversation(text)

    async def served_context(self) -> int:
        """Returns the longest context of the nodes that serve now: tokens of prompt and output together.

        If no node serves, returns the base model's own context; routing then refuses the call with a retryable error.
        """
        longest = (await self.cluster.table()).serving(self.base.fingerprint).longest
        # A starting node reports no context yet; its 0 must not refuse calls.
        return min(self.base.max_context, longest or self.base.max_context)

    def split_model(self, model: str) -> tuple[str, str | None]:
        """Returns the name and the qualifier in the `model` of OpenAI's and vLLM's requests.

        The name is a function's, or the base model's id. The qualifier is an alias or a version; None if none is
        stated.
        """
        if model == self.base.id:
            return model, None
        name, colon, qualifier = model.partition(":")
        # An empty qualifier is invalid, unlike a missing one.
        return name, (qualifier or ":") if colon else None

    async def policy_of(self, tenant: str, model: str) -> Policy:
        """Returns the policy of the function that `model` names; an empty policy for the base model.

        Raises NotFound if the tenant has no such function.
        """
        if model == self.base.id:
            return Policy()
        choices = await self.functions.choices(tenant, *self.split_model(model))
        return choices[0].version.policy

    def _timeout(self, stated: GenerationParams, target: Target) -> float:
        if stated.timeout is not None and stated.timeout > self.max_timeout:
            raise invalid("timeout", f"timeout may be at most {self.max_timeout:g} s here")
        return min(stated.timeout or target.policy.timeout or self.request_timeout, self.max_timeout)

    def _request(
        self,
        id: str,
        tokens: list[int],
        max_tokens: int,
        choice: int,
        target: Target,
        account: Tenant,
        parameters: NodeParameters,
        timeout: float,
    ) -> GenerateRequest:
        sampling, slo = parameters["sampling"], account.slo
        return GenerateRequest(
            id=id,
            base=self.base.fingerprint,
            tenant=account.id,
            token_ids=tokens,
            max_tokens=max_tokens,
            sampling=msgspec.structs.replace(sampling, choice=choice) if choice else sampling,
            stop=parameters["stop"],
            ignore_eos=parameters["ignore_eos"],
            timeout=timeout,
            adapter=target.adapter,
            function=_opaque(target),
            weight=account.weight,
            slo_class=lower_class(slo.slo_class, target.policy.slo_class or slo.slo_class),
            ttft=_seconds(slo.ttft_ms),
            tpot=_seconds(slo.tpot_ms),
            reserved=account.reserved.get(target.function, 0),
        )

    async def _echo(self, source: Source, prompts: list[list[int]], merged: GenerationParams) -> list[Echo]:
        """Returns the echo of each prompt; empty if nothing is echoed. Long prompts are decoded in a thread."""
        if not merged.echoes or not isinstance(source, Prompts):
            return []
        text, prompt_source = self.text, source
        skip, truncated = merged.skip_special_tokens is not False, merged.truncate_prompt_tokens is not None

        def decode() -> list[Echo]:
            texts = prompt_source.texts(text, prompts, truncated=truncated, skip_special=skip)
            firsts = [text.tokenizer.decode(tokens[:1], skip_special_tokens=False) for tokens in prompts]
            offsets: list[list[int]] = [[] for _ in prompts]
            if merged.top_logprob_count is not None:
                pairs = zip(prompts, texts, strict=True)
                offsets = [text.token_offsets(tokens, each, skip_special=skip) for tokens, each in pairs]
            return [Echo(*each) for each in zip(texts, firsts, offsets, strict=True)]

        return decode() if source.characters <= INLINE_CHARACTERS else await self.text_threads.run(decode)


def new_id() -> str:
    return f"inv_{secrets.token_hex(12)}"


def is_background(request: Request) -> bool:
    """Returns whether the call is asynchronous or part of a batch. No header can state that."""
    return bool(getattr(request.state, "spare_only", False))


def background_request(request_id: str, path: str = "", body: bytes = b"", *, rate_taken: bool = False) -> Request:
    """Returns the request of a call without a connection, which runs in spare capacity.

    It looks like one of a client that never disconnects. `rate_taken`: True if the request that submitted the call has
    taken it from the tenant's `rps`.
    """
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if not pending:
            await asyncio.Event().wait()
        return pending.pop()

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": [],
        "query_string": b"",
        "path_params": {"target": path.removeprefix("/invoke/")},
        "state": {"request_id": request_id, "spare_only": True, "rate_taken": rate_taken},
    }
    return Request(scope, receive)


def _take_request_id(request: Request, stated: str | None) -> None:
    """Gives the request the id that its body states. The header has priority; background calls have ids already."""
    if stated is not None and "x-request-id" not in request.headers and not is_background(request):
        request.state.request_id = stated


def _opaque(target: Target) -> str:
    """Returns a hash of the function's name, by which nodes group the calls of one function. Returns an empty string
    for the base model."""
    return "" if target.adapter is None else hashlib.blake2b(target.function.encode(), digest_size=8).hexdigest()


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
