"""LangChain's ChatOpenAI with tools and structured output, against a running service; prints what it got as JSON.
`strict` leaves no room for further properties, which a small model would write.

python calls.py URL KEY MODEL        (tests/e2e/test_service_agent_clients.py runs it in LangChain's environment)
"""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any, Literal

from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.runnables import Runnable
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

Number = Annotated[int, Field(ge=0, le=99_999)]


@tool
def find_tea(kind: Literal["black", "green"]) -> dict[str, Any]:
    """Finds a tea of the shop"""
    return {"kind": kind, "price": 12}


@tool
def order_status(order_id: Number) -> dict[str, Any]:
    """Says where an order is"""
    return {"order_id": order_id, "state": "sent"}


class Ticket(BaseModel):
    """What a customer writes about."""

    topic: Literal["delivery", "refund", "damage"]
    order: Number


TOOLS = [find_tea, order_status]
METHODS = ("json_schema", "function_calling")
QUESTION = "Where is my order 1043?"


def agent(chat: ChatOpenAI) -> dict[str, Any]:
    """Calls a tool, and answers after its result."""
    messages: list[BaseMessage] = [
        HumanMessage(QUESTION),
        chat.bind_tools(TOOLS, tool_choice="any", strict=True).invoke(QUESTION),
    ]
    calls = messages[-1].tool_calls
    messages += [next(each for each in TOOLS if each.name == call["name"]).invoke(call) for call in calls]
    answer = chat.bind_tools(TOOLS, strict=True).bind(max_tokens=12).invoke(messages)
    return {"calls": [[call["name"], call["args"]] for call in calls], "text": answer.text, "more": answer.tool_calls}


def one_call(message: Any) -> list[Any]:
    (call,) = message.tool_calls
    return [call["name"], call["args"]]


def streamed(runnable: Runnable) -> Any:
    first, *rest = runnable.stream(QUESTION)
    return sum(rest, first)


def main(url: str, key: str, model: str) -> None:
    chat = ChatOpenAI(
        model=model, base_url=f"{url}/v1", api_key=key, temperature=1, seed=5, max_tokens=200, max_retries=0
    )
    named = chat.bind_tools(TOOLS, tool_choice="order_status", strict=True)
    forms = {
        method: chat.with_structured_output(Ticket, method=method, strict=True)
        for method in ("json_schema", "function_calling")
    }
    schema = chat.with_structured_output(Ticket.model_json_schema(), strict=True, include_raw=True)
    answers = {
        "agent": agent(chat),
        "calls": {"named": one_call(named.invoke(QUESTION)), "named, streamed": one_call(streamed(named))},
        "tickets": {
            **{method: form.invoke(QUESTION).model_dump() for method, form in forms.items()},
            **{f"{method}, streamed": [*form.stream(QUESTION)][-1].model_dump() for method, form in forms.items()},
            "schema with the raw answer": schema.invoke(QUESTION)["parsed"],
        },
    }
    print(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
