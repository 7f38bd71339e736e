"""Leaves out what asks for nothing in the body of a call, before it is checked.

Clients send such values with each call and each message, whether the service knows the field or not.
"""

from __future__ import annotations

from typing import Any

HINTS = ("cache_control",)
"""Fields of messages, parts and tools that advise a service how to cache. Prefixes are cached here without advice."""
EMPTY: tuple[Any, ...] = (None, "", [], {})
"""Values of a message's fields, other than its content, that say nothing."""


def without_neutral(body: dict[str, Any]) -> dict[str, Any]:
    """Returns the body of a call without null fields, and its messages and tools without fields that say nothing.

    Values that belong to the caller are unchanged: JSON Schemas, arguments, metadata. So is what has a wrong type.
    """
    stated: dict[str, Any] = _without_null(body)
    if isinstance(messages := stated.get("messages"), list):
        stated["messages"] = [_message(each) for each in messages]
    if isinstance(tools := stated.get("tools"), list):
        stated["tools"] = [_tool(each) for each in tools]
    for field in ("stream_options", "response_format"):
        if field in stated:
            stated[field] = _without_null(stated[field])
    return stated


def _message(message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    stated = {
        name: _emptied(value) for name, value in message.items() if name not in HINTS and _emptied(value) not in EMPTY
    }
    if message.get("content") is not None:
        stated["content"] = _content(message["content"])
    elif message.get("role") == "assistant" and "tool_calls" not in stated:
        stated["content"] = ""
    if "reasoning" in stated:  # vLLM's newer name of it
        stated.setdefault("reasoning_content", stated.pop("reasoning"))
    if isinstance(calls := stated.get("tool_calls"), list):
        stated["tool_calls"] = [_tool(each) for each in calls]
    return stated


def _emptied(value: Any) -> Any:
    """Returns the value without null fields, if it is an object."""
    return _without_null(value) if isinstance(value, dict) else value


def _content(content: Any) -> Any:
    return [_without_null(part) for part in content] if isinstance(content, list) else content


def _tool(tool: Any) -> Any:
    """Returns a tool, or a call of one, without null fields."""
    stated = _without_null(tool)
    if isinstance(stated, dict) and "function" in stated:
        stated["function"] = _without_null(stated["function"])
    return stated


def _without_null(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: each for name, each in value.items() if each is not None and name not in HINTS}
