"""Structured output of the real vLLM behind the node's engine: every answer that ends has its form."""

from __future__ import annotations

import json
import random
from pathlib import Path

import jsonschema
import pytest
from tokenizers import Tokenizer

from cluster.messages import Adapter, Grammar, Sampling
from cluster.text import BaseText
from gateway.api.openai_schema import ToolFunction
from gateway.calls.tool_calls import ToolParserName
from gateway.calls.tool_grammars import strict_grammar
from tests.support.drawn_schemas import draw_schema
from tests.support.draws import draws
from tests.vllm.vllm_process import VllmProcess

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
PROMPT = [5, 9, 40, 77]
ROOM = 120


def text_of(vllm: VllmProcess, base: Path, request: str) -> str:
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    return str(tokenizer.decode(vllm.finish(request).tokens, skip_special_tokens=True))


def test_answers_have_their_form(vllm: VllmProcess, base: Path, deployed: list[tuple[Path, Adapter]]) -> None:
    rng, asked = random.Random(2), []
    for number in range(draws(8)):
        schema = draw_schema(rng)
        grammar = Grammar("json", json.dumps(schema))
        sampling = Sampling(temperature=float(number % 2), seed=number, grammar=grammar)
        adapter = None if number % 3 == 0 else deployed[number % 3][1]
        asked.append((vllm.submit(PROMPT, ROOM, adapter, sampling), schema))
        vllm.submit(PROMPT, 4, adapter)
    ended = 0
    for request, schema in asked:
        outcome = vllm.finish(request)
        assert outcome.finished is not None
        assert outcome.finished.reason in ("stop", "length"), outcome.finished
        if outcome.finished.reason == "stop":
            ended += 1
            jsonschema.validate(json.loads(text_of(vllm, base, request)), schema)
    assert ended, "no answer ended"


@pytest.mark.parametrize(
    ("grammar", "answers"),
    [
        (Grammar("choice", json.dumps(["left", "right"])), {"left", "right"}),
        (Grammar("regex", "(ab|cd){2}"), {"abab", "abcd", "cdab", "cdcd"}),
        (Grammar("lark", 'start: "x" ("1" | "2")'), {"x1", "x2"}),
    ],
)
def test_other_kinds(vllm: VllmProcess, base: Path, grammar: Grammar, answers: set[str]) -> None:
    request = vllm.submit(PROMPT, 30, sampling=Sampling(temperature=1.0, seed=3, grammar=grammar))
    assert text_of(vllm, base, request).strip() in answers
    assert vllm.outcomes[request].finished.reason == "stop"  # type: ignore[union-attr]


@pytest.mark.parametrize("parser", ["hermes", "llama3_json"])
def test_grammars_of_strict_tools(vllm: VllmProcess, base: Path, parser: ToolParserName) -> None:
    tools = [ToolFunction("find", parameters=draw_schema(random.Random(1)), strict=True)]
    grammar = strict_grammar(tools, parser, BaseText(base), "possible")
    outcome = vllm.finish(vllm.submit(PROMPT, 12, sampling=Sampling(temperature=1.0, seed=3, grammar=grammar)))
    assert outcome.finished is not None
    assert outcome.finished.reason in ("stop", "length"), outcome.finished


def test_an_answer_that_another_node_began_is_refused(vllm: VllmProcess) -> None:
    sampling = Sampling(grammar=Grammar("regex", "a+"))
    outcome = vllm.finish(vllm.submit(PROMPT, 8, sampling=sampling, generated=[7]))
    assert outcome.finished is not None
    assert outcome.finished.error_type == "unavailable"
