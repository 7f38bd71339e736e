"""Tools and reasoning of a chat: the conversation with them, and the form of its answers."""

from __future__ import annotations

from typing import Any

import msgspec

from cluster.text import BaseText
from gateway.api import openai_schema as openai
from gateway.calls.answers import AnswerForm
from gateway.calls.prompts import Conversation
from gateway.calls.reasoning import OPENING
from gateway.calls.request import Invocation
from gateway.calls.tool_calls import ToolForm, hermes, llama3_json
from gateway.http.errors import invalid

PROMPT_END = 16
"""Number of the prompt's last tokens that are searched for the begin of reasoning."""
LLAMA_MARK = "<|python_tag|>"
"""Text that only chat templates of Llama's form have."""


def conversation_of(call: openai.ChatRequest) -> Conversation:
    """Returns the conversation of a chat, with its tools as values for the chat template. Raises ServiceError."""
    for index, message in enumerate(call.messages):
        if message.content is None and not (message.role == "assistant" and message.tool_calls):
            field = f"messages[{index}].content"
            raise invalid(field, f"{field} is missing; only an assistant's message with tool_calls needs none")
    _check_choice(call)
    variables: dict[str, Any] = dict(call.chat_template_kwargs or {})
    if call.reasoning_effort not in (None, "none"):
        variables["reasoning_effort"] = call.reasoning_effort
    if offered_tools(call):
        variables["tools"] = [msgspec.to_builtins(tool) for tool in call.tools or []]
    return Conversation([message.plain() for message in call.messages], variables=variables)


def offered_tools(call: openai.ChatRequest) -> list[openai.ToolFunction]:
    """Returns the tools that the answer may call."""
    return [] if call.tool_choice == "none" else [tool.function for tool in call.tools or []]


def _check_choice(call: openai.ChatRequest) -> None:
    names = [tool.function.name for tool in call.tools or []]
    if len(set(names)) < len(names):
        raise invalid("tools", "two tools have the same name")
    if call.tool_choice == "required" and not names:
        raise invalid("tool_choice", "tool_choice is required, but there are no tools")
    if isinstance(call.tool_choice, openai.ChosenTool) and call.tool_choice.function.name not in names:
        raise invalid("tool_choice", f"tool_choice names {call.tool_choice.function.name!r}, which is not in tools")


def form_of(call: openai.Shared, invocation: Invocation, text: BaseText) -> AnswerForm | None:
    """Returns the form of a chat's answers; None if they are text alone."""
    if not isinstance(call, openai.ChatRequest):
        return None
    tools = _tool_form(call, invocation, text)
    reasoning = invocation.target.policy.defaults.reasoning_parser is not None
    return AnswerForm(tools, reasoning, call.include_reasoning is not False) if tools or reasoning else None


def opened_reasoning(invocation: Invocation, text: BaseText) -> list[bool]:
    """Returns, for each generation, whether its prompt ends with the begin of the reasoning. An answer that has a form
    begins with its form."""
    return [
        request.sampling.grammar is None and text.decode(request.token_ids[-PROMPT_END:]).rstrip().endswith(OPENING)
        for request in invocation.requests
    ]


def _tool_form(call: openai.ChatRequest, invocation: Invocation, text: BaseText) -> ToolForm | None:
    """Returns the form of tool calls in the answer; None if the call offers no tools.

    A forced call is JSON alone. Otherwise the form is that of `defaults.tool_parser`, or the one that the chat template
    shows.
    """
    names = frozenset(tool.name for tool in offered_tools(call))
    if not names:
        return None
    if call.forced_tools:
        return llama3_json(names)
    defaults = invocation.target.policy.defaults
    template = defaults.chat_template or text.template
    parser = defaults.tool_parser or ("llama3_json" if LLAMA_MARK in template else "hermes")
    return hermes(names) if parser == "hermes" else llama3_json(names)
