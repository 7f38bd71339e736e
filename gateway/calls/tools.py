"""Tools and reasoning of a chat: the conversation with them, and the form of its answers."""

from __future__ import annotations

from typing import Any

from cluster.text import BaseText
from gateway.api import openai_schema as openai
from gateway.calls.answers import AnswerForm
from gateway.calls.prompts import Conversation
from gateway.calls.reasoning import opens_reasoning
from gateway.calls.request import Invocation
from gateway.calls.tool_calls import ToolForm, hermes, llama3_json, tool_parser
from gateway.http.errors import invalid


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
    if call.offered_tools:
        variables["tools"] = [tool.plain() for tool in call.tools or []]
    answer, continues = end_of_prompt(call.messages, call.add_generation_prompt, call.continue_final_message)
    messages = [message.plain() for message in call.messages]
    return Conversation(messages, answer=answer, continues=continues, variables=variables)


def end_of_prompt(messages: list[openai.ChatMessage], opens: bool | None, continues: bool | None) -> tuple[bool, bool]:
    """Returns whether the prompt opens the assistant's turn, and whether it ends inside of the last message. `opens`,
    `continues`: the fields `add_generation_prompt` and `continue_final_message`. Raises ServiceError."""
    if not continues:
        return opens is not False, False
    if opens:
        raise invalid("continue_final_message", "continue_final_message and add_generation_prompt can't both be true")
    if messages[-1].content is None:
        field = f"messages[{len(messages) - 1}].content"
        raise invalid(field, f"{field} is missing; continue_final_message continues it")
    return False, True


def _check_choice(call: openai.ChatRequest) -> None:
    names = [tool.function.name for tool in call.tools or []]
    if len(set(names)) < len(names):
        raise invalid("tools", "two tools have the same name")
    if call.tool_choice == "required" and not names:
        raise invalid("tool_choice", "tool_choice is required, but there are no tools")
    for index, tool in enumerate(call.tools or []):
        kind = (tool.function.parameters or {}).get("type", "object")
        if tool.function.strict and kind != "object":
            field = f"tools[{index}].function.parameters"
            raise invalid(field, f"{field} has the type {kind!r}; the arguments of a strict tool are an object")
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
    """Returns, for each generation, whether its prompt ends with the begin of the reasoning. An answer that is a form
    as a whole begins with it."""
    return [not invocation.is_form and opens_reasoning(text, request.token_ids) for request in invocation.requests]


def _tool_form(call: openai.ChatRequest, invocation: Invocation, text: BaseText) -> ToolForm | None:
    """Returns the form of tool calls in the answer; None if the call offers no tools.

    A forced call is JSON alone. An answer of another stated form has no calls.
    """
    names = frozenset(tool.name for tool in call.offered_tools)
    if call.forced_tools:
        return llama3_json(names)
    if not names or invocation.is_form:
        return None
    parser = tool_parser(invocation.target.policy.defaults, text.template)
    return hermes(names) if parser == "hermes" else llama3_json(names)
