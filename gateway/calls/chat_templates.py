"""Functions' own chat templates (`defaults.chat_template`): checked before they are stored, rendered for calls.

A tenant's template never runs in this process: see template_process. However long a tenant's take, another tenant's
conversation waits for one of them at most.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

import msgspec
from starlette.types import Receive

from adapters.functions import MAX_TEMPLATE
from adapters.helper_process import HelperEnded, HelperProcess
from cluster.errors import ServiceError
from gateway.calls.template_process import RENDER_SECONDS, Job, Refused, Rendered
from gateway.catalog.threads import LeavableThreads
from gateway.http.connected import while_connected
from gateway.http.errors import invalid

ANSWER_SECONDS = 30.0
"""Wait for one conversation, the start of the process included; its limit is in processor time."""
CHECK_SECONDS = 60.0
"""Wait for the check of a template that is to be stored, the checks before it included."""
RETRY_AFTER = 1.0
SAMPLE = ({"role": "user", "content": "Hello"},)
"""Messages that every template must make a text of."""

_decoder = msgspec.msgpack.Decoder(Rendered | Refused)


class _TemplateRefused(Exception):
    """The template makes no text of the messages; this says why, and is fit for the caller."""


class ChatTemplates:
    """Renders chat templates for one gateway worker. `receive` must have given the request's whole body."""

    def __init__(self) -> None:
        self._helper = HelperProcess("gateway.calls.template_process")
        self._thread = LeavableThreads(1)
        self._tenants: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Locks by tenant: one conversation of each is in line."""

    def close(self) -> None:
        """Ends the process, and with it what is being rendered."""
        self._helper.kill()

    async def check(
        self, tenant: str, policy: Mapping[str, Any], *, special: Mapping[str, str], receive: Receive, within: str = ""
    ) -> None:
        """Checks the template that a policy states, if any; `within`: where the caller stated it.

        Raises ServiceError (`validation_failed`) for one that makes no text of a user's message, and what `render`
        does. What is no text, or too long, is left to adapters.functions.parse_policy.
        """
        defaults = policy.get("defaults")
        template = defaults.get("chat_template") if isinstance(defaults, dict) else None
        if not isinstance(template, str) or not 0 < len(template) <= MAX_TEMPLATE:
            return
        job, deadline = Job(template, list(SAMPLE), dict(special)), time.monotonic() + CHECK_SECONDS
        try:
            await self._render(tenant, job, deadline, receive)
        except _TemplateRefused as refused:
            field = f"{within}defaults.chat_template"
            raise invalid(field, f"{field}: {refused}") from None

    async def render(self, tenant: str, job: Job, *, deadline: float, receive: Receive) -> str:
        """Returns the conversation's text. `deadline` in monotonic seconds.

        Raises ClientGone, ServiceError: `validation_failed` where the template refuses the messages, or takes too much
        time or memory over them, `timeout`, `unavailable`.
        """
        try:
            return await self._render(tenant, job, deadline, receive)
        except _TemplateRefused as refused:
            raise invalid("messages", f"the function's chat template refused the messages: {refused}") from None

    async def _render(self, tenant: str, job: Job, deadline: float, receive: Receive) -> str:
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                return await while_connected(self._in_turn(tenant, job), receive)
        except TimeoutError:
            raise ServiceError("timeout", "the timeout passed before the chat template was rendered") from None

    async def _in_turn(self, tenant: str, job: Job) -> str:
        tenant_lock = self._tenants.setdefault(tenant, asyncio.Lock())
        async with tenant_lock:
            return await self._thread.run(lambda: self._ask(job))

    def _ask(self, job: Job) -> str:
        """Blocks."""
        try:
            limited = msgspec.structs.replace(job, seconds=RENDER_SECONDS)
            answer: Rendered | Refused = _decoder.decode(self._helper.ask(limited, ANSWER_SECONDS))
        except TimeoutError:
            why = f"this host is too busy to render a chat template within {ANSWER_SECONDS:g} s"
            raise ServiceError("unavailable", why, retry_after=RETRY_AFTER) from None
        except HelperEnded as ended:
            raise _why(ended.code) from None
        if answer.last:
            self._helper.end()
        if isinstance(answer, Refused):
            raise _TemplateRefused(answer.problem)
        return answer.text


def _why(code: int) -> Exception:
    """Returns what the process has ended of in the middle of its work."""
    if code == -signal.SIGPROF:
        return _TemplateRefused(f"it takes more than {RENDER_SECONDS:g} s of processor time")
    if code in (-signal.SIGKILL, -signal.SIGTERM):
        why = "the process that renders chat templates was ended from outside"
        return ServiceError("unavailable", why, retry_after=RETRY_AFTER)
    if code < 0:
        return _TemplateRefused("it breaks the process that renders it")
    return RuntimeError(f"the process that renders chat templates ended with exit code {code}")
