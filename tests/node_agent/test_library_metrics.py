"""Metrics of the library that computes a node's tokens: the engine's answer, and the node's route."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from node_agent.engine import library_metrics
from node_agent.engine.library_metrics import metrics_answer
from node_agent.ipc import Answer, ReadMetrics
from tests.node_agent.served_node import Node, run_scenario, served_node
from tests.support.local_engine import MakeEngine

TEXT = '# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine="0"} 3.0\n'
PATH = "/metrics/engine"


def failing() -> bytes:
    raise FileNotFoundError("/run/secret-folder")


def test_the_text_is_passed_on_as_it_is() -> None:
    assert metrics_answer("m", TEXT.encode) == Answer("m", metrics=TEXT)


def test_a_text_without_end_is_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_metrics, "MAX_BYTES", len(TEXT))
    assert metrics_answer("m", TEXT.encode).metrics == TEXT
    answer = metrics_answer("m", (TEXT + "\n").encode)
    assert (answer.error_type, answer.metrics) == ("internal", "") and f"at most {len(TEXT)}" in answer.error


def test_a_library_that_fails_costs_the_answer_alone(caplog: pytest.LogCaptureFixture) -> None:
    answer = metrics_answer("m", failing)
    assert answer.error_type == "internal" and "FileNotFoundError" in answer.error and "secret" not in answer.error
    assert "secret-folder" in caplog.text, "the log has it all"


def test_our_own_engine_says_where_its_metrics_are(make_engine: MakeEngine) -> None:
    engine = make_engine()
    answer = engine.ask(ReadMetrics("m"))
    assert answer.error_type == "not_found" and "GET /metrics" in answer.error
    assert engine.engine.vllm_load is None


async def get(node: Node, **headers: str) -> tuple[int, str, str]:
    async with node.session.get(node.url + PATH, headers=headers) as response:
        return response.status, response.content_type, await response.text()


def test_a_node_answers_with_what_its_engine_says(tmp_path: Path, stories_dir: Path) -> None:
    async def scenario() -> None:
        async with served_node(tmp_path, stories_dir) as node:
            status, _, _ = await get(node)
            assert status == 503, "there is no engine yet"
            engine = await node.engine()
            for answer, expected in (
                (Answer("", metrics=TEXT), (200, "text/plain", TEXT)),
                (Answer("", error_type="not_found", error="the engine is `garnish`"), (404, "application/json", "")),
            ):
                asking = asyncio.create_task(get(node))
                question = await engine.hear()
                assert isinstance(question, ReadMetrics)
                await engine.say(msgspec.structs.replace(answer, id=question.id))
                status, kind, text = await asking
                assert (status, kind) == expected[:2] and (expected[2] or answer.error) in text
            status, _, _ = await get(node, authorization="Bearer wrong")
            assert status == 401

    run_scenario(scenario())
