"""Grammars of strict tools: text passes, and each call that the parser finds has valid arguments."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any, get_args

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer, grammar_from
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from tokenizers import AddedToken

from cluster.grammars import compiled_form, limits, problem_of
from cluster.messages import Grammar
from cluster.text import BaseText
from gateway.api.openai_schema import ToolFunction
from gateway.calls.answers import AnswerForm, AnswerParser
from gateway.calls.tool_calls import CallArguments, CallBegin, Text, ToolForm, ToolParserName, hermes, llama3_json
from gateway.calls.tool_grammars import Reasoning, strict_grammar
from tests.support.drawn_schemas import draw_schema
from tests.support.draws import draws

ROOM = 300
TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")


@pytest.fixture(scope="module", params=["marks of text", "marks of their own"])
def text(request: pytest.FixtureRequest, stories_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> BaseText:
    """Tokenizers without and with tokens for the marks. Those of Qwen are not special, and that of Llama is."""
    if request.param == "marks of text":
        return BaseText(stories_dir)
    model = tmp_path_factory.mktemp("model") / "marked"
    shutil.copytree(stories_dir, model)
    tokenizer = BaseText(stories_dir).tokenizer
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in (*TAGS, "{name}")])
    tokenizer.add_special_tokens([AddedToken("<|python_tag|>", special=True), AddedToken("<|im_start|>", special=True)])
    tokenizer.save(str(model / "tokenizer.json"))
    return BaseText(model)


@pytest.fixture(scope="module")
def words(text: BaseText, tmp_path_factory: pytest.TempPathFactory) -> LLTokenizer:
    file = tmp_path_factory.mktemp("words") / "tokenizer.json"
    text.tokenizer.save(str(file))
    return LLTokenizer(str(file), n_vocab=text.tokenizer.get_vocab_size(), eos_token=sorted(text.eos_ids))


class Walk:
    """Answer under a grammar. It follows drawn pieces of text where the grammar lets it, and otherwise any token."""

    def __init__(self, grammar: Grammar, text: BaseText, words: LLTokenizer, rng: random.Random) -> None:
        self.matcher = LLMatcher(words, compiled_form(grammar), log_level=0, limits=limits())
        assert not self.matcher.is_error(), self.matcher.get_error()
        self.text, self.rng, self.tokens = text, rng, list[int]()

    def follow(self, piece: str) -> bool:
        """Returns whether the whole piece was allowed."""
        ids = self.text.tokenizer.encode(piece, add_special_tokens=False).ids
        taken = self.matcher.try_consume_tokens(ids)
        self.tokens += ids[:taken]
        return taken == len(ids)

    def step(self) -> None:
        size = self.text.tokenizer.get_vocab_size()
        bits = allocate_token_bitmask(1, size)
        fill_next_token_bitmask(self.matcher, bits)
        allowed = [id for id in range(size) if bits[0][id // 32] >> (id % 32) & 1 and id not in self.text.eos_ids]
        if allowed:
            token = self.rng.choice(allowed)
            assert self.matcher.consume_token(token)
            self.tokens.append(token)

    def run(self, pieces: list[str]) -> str | None:
        """Returns the answer's text; None if the answer has not ended within its room."""
        while len(self.tokens) < ROOM:
            if self.matcher.is_stopped() or (self.matcher.is_accepting() and self.rng.random() < 0.1):
                return str(self.text.tokenizer.decode(self.tokens, skip_special_tokens=True))
            if self.rng.random() < 0.4 or not self.follow(self.rng.choice(pieces)):
                self.step()
        return None


def calls_in(answer: str, form: ToolForm, *, reasoning: bool, opened: bool) -> tuple[str, list[tuple[str, str]]]:
    """Returns the text, and (name, arguments) of each call."""
    parser, text, calls = AnswerParser(AnswerForm(form, reasoning), opened=opened), "", list[tuple[str, str]]()
    for piece in parser.feed(answer, 1, last=True):
        match piece:
            case Text(part):
                text += part
            case CallBegin(_, name):
                calls.append((name, ""))
            case CallArguments(index, part):
                calls[index] = (calls[index][0], calls[index][1] + part)
    return text, calls


def form_of(parser: ToolParserName) -> ToolForm:
    return (hermes if parser == "hermes" else llama3_json)(frozenset({"find", "note"}))


def tools_of(schema: dict[str, Any]) -> list[ToolFunction]:
    return [ToolFunction("find", parameters=schema, strict=True), ToolFunction("note", parameters={"not": {}})]


def pieces_of(parser: ToolParserName) -> list[str]:
    key = "arguments" if parser == "hermes" else "parameters"
    bad = [f'{{"name": "find", "{key}": {{"wrong": [1}}}}', f'{{"{key}": {{}}, "name": "find"}}', "{", "; {"]
    good = ['{"name": "find", ', '{"name": "note", ', f'"{key}": {{"', "}", '"', "\n", " ", ";"]
    return [*TAGS, *TAGS, "<|python_tag|>", "<tool", "_call>", "\xa0{", "once upon {a} time", *bad, *good]


def begin_of(parser: ToolParserName) -> str:
    return '<tool_call>\n{"name": "find", "arguments": {' if parser == "hermes" else '{"name": "find", "parameters": {'


@pytest.mark.parametrize("reasoning", get_args(Reasoning))
@pytest.mark.parametrize("parser", get_args(ToolParserName))
def test_every_call_is_valid(text: BaseText, words: LLTokenizer, parser: ToolParserName, reasoning: Reasoning) -> None:
    found = texts = 0
    for seed in range(draws(40)):
        rng = random.Random(seed)
        schema = draw_schema(rng, depth=1)
        grammar = strict_grammar(tools_of(schema), parser, text, reasoning)
        assert not problem_of(grammar)
        walk = Walk(grammar, text, words, rng)
        if rng.random() < 0.7:
            walk.follow(("x </think>" if reasoning == "opened" else "") + begin_of(parser))
        answer = walk.run(pieces_of(parser))
        if answer is None:
            continue
        rest, calls = calls_in(answer, form_of(parser), reasoning=reasoning != "none", opened=reasoning == "opened")
        found, texts = found + len(calls), texts + bool(rest)
        for name, arguments in calls:
            value = json.loads(arguments)
            assert isinstance(value, dict), answer
            if name == "find":
                jsonschema.validate(value, schema)
    assert found, "no answer had a call"
    assert texts, "no answer had text"


TEXTS = [
    "", "Hello", "a {b} c", "if x < 3 and <tool> then", "ü€\n\n", "<tool_cal", "It ends </think> here",
    "Let me think. <think>why {not}", "see {name}", "</tool_call>",
]  # fmt: skip


@pytest.mark.parametrize("reasoning", get_args(Reasoning))
@pytest.mark.parametrize("parser", get_args(ToolParserName))
def test_text_passes(text: BaseText, words: LLTokenizer, parser: ToolParserName, reasoning: Reasoning) -> None:
    grammar = strict_grammar(tools_of(draw_schema(random.Random(3))), parser, text, reasoning)
    for each in TEXTS:
        walk = Walk(grammar, text, words, random.Random(0))
        assert walk.follow(each), each
        assert walk.matcher.is_accepting(), each


@pytest.mark.parametrize(
    ("reasoning", "answer", "expected"),
    [
        ("none", '{"a": 1}', False),
        ("none", '<|python_tag|>{"a": 1}', False),
        ("none", 'Here: {"a": 1}', True),
        ("possible", '<think>{"a": 1}', True),
        ("possible", '<think>b</think>\n{"a": 1}', False),
        ("possible", '<think>b</think>\nHere: {"a": 1}', True),
        ("opened", '{"a": 1}', True),
        ("opened", '{"a": 1}</think> {"a": 1}', False),
    ],
)
def test_where_text_may_not_begin_like_a_call(
    text: BaseText, words: LLTokenizer, reasoning: Reasoning, answer: str, expected: bool
) -> None:
    grammar = strict_grammar(tools_of(draw_schema(random.Random(3))), "llama3_json", text, reasoning)
    assert Walk(grammar, text, words, random.Random(0)).follow(answer) is expected


def test_vllm_compiles_the_same_grammar(text: BaseText) -> None:
    """vLLM's guidance backend reads a grammar by this function, which also takes another notation for grammars."""
    schema = {"properties": {"a": {"description": "x ::= y"}}, "additionalProperties": False}
    for parser in get_args(ToolParserName):
        for reasoning in get_args(Reasoning):
            grammar = strict_grammar(tools_of(schema), parser, text, reasoning)
            assert grammar_from("grammar", grammar.text) == compiled_form(grammar)
