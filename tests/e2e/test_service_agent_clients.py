"""Clients of agents, unchanged, each in an environment of its own: LangChain's ChatOpenAI and the Vercel AI SDK.

They call tools and get objects over stories260K, whose calls and objects are forced by a form."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from whole_service import MakeService, Service

from tests.support.environments import CLIENTS, FOLDER, install

TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)
CALL_SECONDS = 200


@pytest.fixture(scope="module")
def story(
    make_service: MakeService, stories_adapters: dict[str, Path], copy_with_template: Callable[[str], Path]
) -> Service:
    dragon = {"tenant": "acme", "adapter": str(stories_adapters["dragon"])}
    return make_service(copy_with_template(TEMPLATE), {"dragon": dragon}, ("acme",)).start()


def environment(name: str) -> Path:
    """Returns the folder of a client's environment, made if need be."""
    folder = FOLDER / name
    try:
        install(name, folder)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as problem:
        pytest.skip(f"{name} can't be installed here, its test is NOT run: {problem}")
    return folder


def printed(story: Service, *command: str | Path) -> dict[str, Any]:
    """Returns what a client's script prints."""
    key = story.credentials["keys"]["acme"]
    done = subprocess.run(
        [*command, story.url, key, "dragon"],
        env={**os.environ, "PYTHONPATH": "", "LANGSMITH_TRACING": "false"},
        capture_output=True,
        text=True,
        timeout=CALL_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    answers: dict[str, Any] = json.loads(done.stdout)
    return answers


def assert_call(call: list[Any]) -> None:
    name, arguments = call
    if name == "order_status":
        assert 0 <= arguments.pop("order_id") <= 99_999
    else:
        assert (name, arguments.pop("kind") in ("black", "green")) == ("find_tea", True)
    assert not arguments


def assert_ticket(ticket: dict[str, Any]) -> None:
    assert set(ticket) == {"topic", "order"}
    assert ticket["topic"] in ("delivery", "refund", "damage")
    assert 0 <= ticket["order"] <= 99_999


def test_langchain(story: Service) -> None:
    answers = printed(story, environment("langchain") / "bin" / "python", CLIENTS / "langchain" / "calls.py")
    agent = answers["agent"]
    (call,) = agent["calls"]
    assert_call(call)
    assert agent["text"]
    assert agent["more"] == []
    calls = answers["calls"]
    assert calls["named"] == calls["named, streamed"]
    assert calls["named"][0] == "order_status"
    assert_call(calls["named"])
    tickets = answers["tickets"]
    assert len(tickets) == 5
    for ticket in tickets.values():
        assert_ticket(ticket)


def test_ai_sdk(story: Service) -> None:
    folder = environment("ai-sdk")
    script = folder / "calls.js"  # its imports are searched from where it lies
    script.write_bytes((CLIENTS / "ai-sdk" / script.name).read_bytes())
    answers = printed(story, folder / "bin" / "node", script)
    assert set(answers) == {"openai", "openai-compatible"}
    for got in answers.values():
        assert got["agent"] == got["agent, streamed"]
        (call,) = got["agent"]["calls"]
        assert_call(call)
        assert got["agent"]["text"]
        assert got["agent"]["steps"] == 2
        assert got["named"][0] == "order_status"
        assert_call(got["named"])
        assert got["object"] == got["object, streamed"] == got["output"]
        assert_ticket(got["object"])
