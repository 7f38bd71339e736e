"""Functions' own chat templates (`defaults.chat_template`): checked before they are stored, rendered for calls.

A tenant's template never runs in this process: see template_process and tenant_helpers.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.types import Receive

from adapters.functions import MAX_TEMPLATE
from adapters.helper_process import HelperEnded, HelperProcess
from cluster.errors import ServiceError
from gateway.calls.template_process import RENDER_SECONDS, Job, Refused, Rendered
from gateway.calls.tenant_helpers import ProgramKilled, TenantHelpers
from gateway.http.connected import while_connected
from gateway.http.errors import invalid
from gateway.places.places import Places

ANSWER_SECONDS = 30.0
"""Seconds to wait until one conversation is rendered, including the start of the process. The limit of the template
itself is in processor time."""
CHECK_SECONDS = 60.0
"""Seconds to wait for the check of a template, including the checks queued before it."""
RETRY_AFTER = 1.0
SAMPLE = ({"role": "user", "content": "Hello"},)
"""Messages that each template must be able to render."""

_decoder = msgspec.msgpack.Decoder(Rendered | Refused)


class _TemplateRefused(Exception):
    """The template can't render the messages. The text says why, and may be shown to the caller."""


class _TemplateKilled(_TemplateRefused, ProgramKilled):
    """The process that rendered the template was killed, broke, or had to be replaced."""


class ChatTemplates:
    """Renderer of chat templates for one gateway worker.

    The `receive` arguments must have returned the request's whole body.
    """

    def __init__(self, places: Places) -> None:
        """`places`: one per helper process."""
        self._helpers = TenantHelpers("gateway.calls.template_process", places, "the chat template")

    def close(self) -> None:
        """Kills the helper processes, and abandons the conversations that they render."""
        self._helpers.close()

    async def check(
        self, tenant: str, policy: Mapping[str, Any], *, special: Mapping[str, str], receive: Receive, within: str = ""
    ) -> None:
        """Checks the template in a policy, if it has one. `within`: prefix of the policy's fields in errors.

        Raises ServiceError `validation_failed` if the template can't render a user's message, and the errors of
        `render`. A template that is no text, or is too long, is left to adapters.functions.parse_policy.
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
        """Returns the rendered conversation. `deadline`: monotonic seconds.

        Raises ClientGone, and ServiceError: `validation_failed` if the template refuses the messages or exceeds its
        time or memory, `overloaded` while it is not tried because it was killed, `timeout`, `unavailable`.
        """
        try:
            return await self._render(tenant, job, deadline, receive)
        except _TemplateRefused as refused:
            raise invalid("messages", f"the function's chat template refused the messages: {refused}") from None

    async def _render(self, tenant: str, job: Job, deadline: float, receive: Receive) -> str:
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                rendering = self._helpers.run(tenant, job.template, lambda helper: self._ask(helper, job))
                return await while_connected(rendering, receive)
        except TimeoutError:
            raise ServiceError("timeout", "the timeout passed before the chat template was rendered") from None

    def _ask(self, helper: HelperProcess, job: Job) -> str:
        """Returns the conversation, rendered by the helper process. Blocks. Raises ServiceError `unavailable`,
        _TemplateRefused."""
        try:
            limited = msgspec.structs.replace(job, seconds=RENDER_SECONDS)
            answer: Rendered | Refused = _decoder.decode(helper.ask(limited, ANSWER_SECONDS))
        except TimeoutError:
            why = f"this host is too busy to render a chat template within {ANSWER_SECONDS:g} s"
            raise ServiceError("unavailable", why, retry_after=RETRY_AFTER) from None
        except HelperEnded as ended:
            raise _why(ended.code) from None
        if answer.last:
            helper.end()
        if isinstance(answer, Refused):
            raise _TemplateKilled(answer.problem) if answer.last else _TemplateRefused(answer.problem)
        return answer.text


def _why(code: int) -> Exception:
    """Returns the error for a process that ended during a job, by its exit code."""
    if code == -signal.SIGPROF:
        return _TemplateKilled(f"it takes more than {RENDER_SECONDS:g} s of processor time")
    if code in (-signal.SIGKILL, -signal.SIGTERM):
        why = "the process that renders chat templates was ended from outside"
        return ServiceError("unavailable", why, retry_after=RETRY_AFTER)
    if code < 0:
        return _TemplateKilled("it breaks the process that renders it")
    return RuntimeError(f"the process that renders chat templates ended with exit code {code}")
