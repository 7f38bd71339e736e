"""Tool calls in answers: the same pieces whatever parts the text comes in, and nothing lost."""

from __future__ import annotations

import json
import random
from time import process_time

import pytest

from gateway.calls.tool_calls import CallArguments, CallBegin, Text, ToolForm, ToolParser, hermes, llama3_json
from tests.support.draws import draws

NAMES = frozenset({"find_order", "refund"})
CALL = '{"name": "find_order", "arguments": {"id": 7, "note": "a \\"}\\" b"}}'
REFUND = '{"name": "refund", "arguments": {}}'


def parsed(form: ToolForm, parts: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """Returns the text, and (name, arguments) of each call."""
    parser, text, calls = ToolParser(form), "", list[tuple[str, str]]()
    for piece in [*(piece for part in parts for piece in parser.feed(part)), *parser.end()]:
        match piece:
            case Text(part):
                text += part
            case CallBegin(index, name, id):
                assert index == len(calls)
                assert id.startswith("call_")
                calls.append((name, ""))
            case CallArguments(index, part):
                calls[index] = (calls[index][0], calls[index][1] + part)
    assert parser.calls == len(calls)
    return text, calls


ARGUMENTS = '{"id": 7, "note": "a \\"}\\" b"}'
CASES = [
    (hermes, f"<tool_call>\n{CALL}\n</tool_call>", "", [("find_order", ARGUMENTS)]),
    (hermes, f"Let me see.\n<tool_call>{CALL}</tool_call>", "Let me see.", [("find_order", ARGUMENTS)]),
    (
        hermes,
        f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{REFUND}\n</tool_call>\n",
        "",
        [("find_order", ARGUMENTS), ("refund", "{}")],
    ),
    (hermes, "No call < here, <tool_cal", "No call < here, <tool_cal", []),
    (hermes, "", "", []),
    (hermes, " \n", " \n", []),
    (hermes, "<tool_call>nonsense</tool_call> and more", "<tool_call>nonsense</tool_call> and more", []),
    (hermes, '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
     '<tool_call>{"name": "other", "arguments": {}}</tool_call>', []),
    (hermes, '<tool_call>{"arguments": {"id": 1}, "name": "refund"}</tool_call>', "", [("refund", '{"id": 1}')]),
    (hermes, '<tool_call>{"name": "refund"}</tool_call>', "", [("refund", "{}")]),
    (hermes, '<tool_call>{"name": "refund", "arguments": {"a": [1, {"b', "", [("refund", '{"a": [1, {"b')]),
    (hermes, '<tool_call>{"name": "ref', '<tool_call>{"name": "ref', []),
    (hermes, 'a\n<tool_call>bad</tool_call> b', 'a\n<tool_call>bad</tool_call> b', []),
    (hermes, '<tool_call>{"name": "refund", "arguments": {"a": "</tool_call>"}}</tool_call>', "",
     [("refund", '{"a": "</tool_call>"}')]),
    (hermes, '<tool_call>{"name": "refund", "arguments": {"a": "b}}\n</tool_call>\n<tool_call>' + REFUND, "",
     [("refund", '{"a": "b}}\n'), ("refund", "{}")]),
    (hermes, f"<tool_call>{REFUND} and more</tool_call>", "and more", [("refund", "{}")]),
    *[(form, before + answer + after, before + answer + after, []) for answer in [
        '{"name": "\\x", "arguments": {}}', '{"name": "a\nb", "arguments": {}}', '{"name": ["refund"]}',
        '{"name": {"a": 1}, "arguments": {}}', '{"name": ' + "[" * 5000, '{"name": null}', '{"name": "a', "{\\",
    ] for form, before, after in [(hermes, "<tool_call>", "</tool_call>"), (llama3_json, "", "")]],
    (llama3_json, '{"arguments": {"a": "\\ud800"}, "name": "refund"}', "", [("refund", '{"a": "?"}')]),
    (llama3_json, '{"name": "refund", "arguments": "\\ud800"}', "", [("refund", "?")]),
    (llama3_json, CALL, "", [("find_order", ARGUMENTS)]),
    (llama3_json, f"<|python_tag|>{CALL}; {REFUND}", "", [("find_order", ARGUMENTS), ("refund", "{}")]),
    (llama3_json, '{"name": "refund", "parameters": {"id": 2}}', "", [("refund", '{"id": 2}')]),
    (llama3_json, "Hello {you}", "Hello {you}", []),
    (llama3_json, '{"answer": 3}', '{"answer": 3}', []),
    (llama3_json, "{", "{", []),
]  # fmt: skip


@pytest.mark.parametrize(("form", "answer", "text", "calls"), CASES)
def test_calls_and_text(form: type, answer: str, text: str, calls: list[tuple[str, str]]) -> None:
    for parts in ([answer], list(answer), [answer[:5], answer[5:]]):
        assert parsed(form(NAMES), parts) == (text, calls), parts


@pytest.mark.parametrize("seed", range(draws(10)))
def test_drawn_parts_give_the_same_pieces(seed: int) -> None:
    rng = random.Random(seed)
    for form, answer, text, calls in CASES:
        parts, at = [], 0
        while at < len(answer):
            size = rng.randint(1, 9)
            parts.append(answer[at : at + size])
            at += size
        assert parsed(form(NAMES), parts) == (text, calls), parts


@pytest.mark.parametrize("begin", ['{"name": "refund", "arguments": {"a": "', '{"answer": "'])
def test_long_calls_take_a_time_in_proportion_to_their_length(begin: str) -> None:
    """Text is parsed on the gateway's event loop. The limit is far above the time, and far below that of a parser that
    reads the call again for each token."""
    parser = ToolParser(llama3_json(NAMES))
    began = process_time()
    parser.feed(begin)
    for _ in range(10_000):
        parser.feed('x\\" ')
    parser.end()
    assert process_time() - began < 3


def test_a_name_comes_before_its_arguments_end() -> None:
    parser = ToolParser(hermes(NAMES))
    pieces = parser.feed('<tool_call>{"name": "refund", "arguments": {"id"')
    assert isinstance(pieces[0], CallBegin)
    assert pieces[1:] == [CallArguments(0, '{"id"')]
    assert parser.feed(": 3}") == [CallArguments(0, ": 3}")]
    assert parser.feed("}</tool_call>") == []
    assert json.loads('{"id": 3}')
