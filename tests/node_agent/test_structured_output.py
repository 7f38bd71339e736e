"""Structured output in mixed batches: every answer has its form, and every token is the one that PEFT's logits lead to
among those that the form allows."""

from __future__ import annotations

import ctypes
import json
import random
import resource
import time
from pathlib import Path

import jsonschema
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from cluster.grammars import compiled_form
from cluster.messages import Grammar, Sampling
from cluster.text import BaseText
from gateway.api.openai_schema import ToolFunction
from gateway.calls.tool_grammars import strict_grammar
from node_agent.engine import grammars
from tests.node_agent.test_parameters import LENGTH, STORY, usual
from tests.support.drawn_schemas import draw_schema
from tests.support.draws import draws
from tests.support.local_engine import LocalEngine, MakeEngine
from tests.support.peft_reference import TIE, PeftReference

ROOM = 200
"""Tokens within which most drawn answers end."""


@pytest.fixture
def tokenizer(stories_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(stories_dir / "tokenizer.json"))


def json_form(schema: object) -> Grammar:
    return Grammar("json", json.dumps(schema))


def text_of(engine: LocalEngine, tokenizer: Tokenizer, request: str) -> str:
    ends = engine.engine.eos_ids
    return str(tokenizer.decode([token for token in engine.outcomes[request].tokens if token not in ends]))


@pytest.mark.parametrize("seed", range(draws(10)))
def test_every_answer_has_its_form(
    make_engine: MakeEngine,
    drawn_adapters: list[Path],
    tokenizer: Tokenizer,
    reference: PeftReference,
    seed: int,
    stories_dir: Path,
) -> None:
    rng = random.Random(seed)
    engine = make_engine(max_rows=6, chunk_tokens=24, block_tokens=4)
    plain = usual(engine)
    functions = [(None, None), *((path, engine.deploy(path)) for path in drawn_adapters[:2])]
    asked = []
    for number in range(6):
        directory, adapter = functions[number % 3]
        schema = draw_schema(rng)
        way = Sampling(temperature=float(number >= 3), seed=rng.getrandbits(30), grammar=json_form(schema))
        asked.append((engine.submit(STORY, ROOM, adapter, way), schema, directory, way))
        if number % 2:
            asked.append((engine.submit(STORY, LENGTH), None, None, Sampling(temperature=0.0)))
    engine.run()
    ended = 0
    for request, schema, directory, way in asked:
        outcome = engine.outcomes[request]
        assert outcome.finished is not None
        if schema is None:
            assert outcome.tokens == plain, "a neighbour's form has changed it"
            continue
        assert outcome.finished.reason in ("stop", "length"), outcome.finished
        if way.temperature == 0:
            assert_follows(engine, reference, stories_dir, (way, directory), outcome.tokens)
        if outcome.finished.reason == "stop":
            ended += 1
            jsonschema.validate(json.loads(text_of(engine, tokenizer, request)), schema)
    assert ended, "no answer ended"


def assert_follows(
    engine: LocalEngine, reference: PeftReference, model: Path, asked: tuple[Sampling, Path | None], tokens: list[int]
) -> None:
    """Each token of a greedy answer is the likeliest of PEFT's logits that the form allows."""
    way, directory = asked
    assert way.grammar is not None
    vocab, ends = engine.base.vocab_size, sorted(engine.engine.eos_ids)
    words = LLTokenizer(str(model / "tokenizer.json"), n_vocab=vocab, eos_token=ends)
    matcher = LLMatcher(words, compiled_form(way.grammar), log_level=0)
    raw = reference.logits(directory, STORY + tokens[:-1], last=len(tokens))
    for place, token in enumerate(tokens):
        allowed = torch.tensor(list(matcher.compute_logit_bias()[:vocab])).bool()
        assert float(raw[place][allowed].max() - raw[place][token]) < TIE, place
        assert matcher.consume_token(token), place


@pytest.mark.parametrize(
    ("grammar", "answers"),
    [
        (Grammar("choice", json.dumps(["left", 'a "b"', "right"])), {"left", 'a "b"', "right"}),
        (Grammar("regex", "(ab|cd){2}"), {"abab", "abcd", "cdab", "cdcd"}),
        (Grammar("lark", 'start: "x" ("1" | "2")'), {"x1", "x2"}),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_other_kinds(
    make_engine: MakeEngine, tokenizer: Tokenizer, grammar: Grammar, answers: set[str], temperature: float
) -> None:
    engine = make_engine()
    request = engine.submit(STORY, 30, sampling=Sampling(temperature=temperature, seed=3, grammar=grammar))
    engine.run()
    assert text_of(engine, tokenizer, request).strip() in answers
    assert engine.outcomes[request].finished.reason == "stop"  # type: ignore[union-attr]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_call_of_a_strict_tool_keeps_its_schema(
    make_engine: MakeEngine, tokenizer: Tokenizer, stories_dir: Path, temperature: float
) -> None:
    """The call was begun on another node, since a small model does not begin one."""
    schema = draw_schema(random.Random(7))
    tools = [ToolFunction("find", parameters=schema, strict=True)]
    grammar = strict_grammar(tools, "hermes", BaseText(stories_dir), "none")
    begun = tokenizer.encode("Well. <tool_call>", add_special_tokens=False).ids
    engine = make_engine()
    sampling = Sampling(temperature=temperature, seed=4, grammar=grammar)
    request = engine.submit(STORY, ROOM, sampling=sampling, generated=begun)
    engine.run()
    call, closing, _ = text_of(engine, tokenizer, request).partition("</tool_call>")
    assert closing
    jsonschema.validate(json.loads(call)["arguments"], schema)


def test_an_answer_goes_on_where_another_node_ended(make_engine: MakeEngine) -> None:
    engine = make_engine()
    way = Sampling(temperature=1.0, seed=9, grammar=json_form(draw_schema(random.Random(4))))
    whole = engine.submit(STORY, ROOM, sampling=way)
    engine.run()
    tokens = engine.outcomes[whole].tokens
    for length in (1, len(tokens) // 2, len(tokens) - 1):
        request = engine.submit(STORY, ROOM, sampling=way, generated=tokens[:length])
        engine.run()
        assert engine.outcomes[request].tokens == tokens[length:]


def test_a_preempted_answer_keeps_its_form(make_engine: MakeEngine) -> None:
    engine = make_engine(max_rows=1)
    way = Sampling(temperature=0.7, seed=2, grammar=json_form(draw_schema(random.Random(5))))
    alone = engine.submit(STORY, ROOM, sampling=way)
    engine.run()
    early = engine.submit(STORY, ROOM, sampling=way, slo_class="best_effort")
    while len(engine.outcomes[early].tokens) < 3:
        engine.step()
    engine.submit(STORY, 2, slo_class="strict")
    engine.run()
    assert engine.outcomes[early].finished.preemptions == 1  # type: ignore[union-attr]
    assert engine.outcomes[early].tokens == engine.outcomes[alone].tokens


@pytest.mark.parametrize(
    "sampling",
    [
        {"min_tokens": 20},
        {"bad_words": [[token] for token in range(3, 500)]},
        {"logit_bias": dict.fromkeys(range(3, 500), -100.0)},
        {"stop_token_ids": [5]},
    ],
)
def test_the_form_comes_before_other_rules(
    make_engine: MakeEngine, tokenizer: Tokenizer, sampling: dict[str, object]
) -> None:
    engine = make_engine()
    way = Sampling(temperature=0.0, grammar=Grammar("choice", '["left", "right"]'), **sampling)  # type: ignore[arg-type]
    request = engine.submit(STORY, 30, sampling=way, ignore_eos=True)
    engine.run()
    assert text_of(engine, tokenizer, request).strip() in {"left", "right"}
    assert engine.outcomes[request].finished.reason == "stop"  # type: ignore[union-attr]


def test_a_grammar_that_cannot_be_compiled_ends_its_request_alone(make_engine: MakeEngine) -> None:
    engine = make_engine()
    bad = engine.submit(STORY, 8, sampling=Sampling(temperature=0.0, grammar=Grammar("regex", "(")))
    good = engine.submit(STORY, 8)
    engine.run()
    finished = engine.outcomes[bad].finished
    assert finished is not None
    assert (finished.reason, finished.error_type) == ("error", "validation_failed")
    assert len(engine.outcomes[good].tokens) == 8


def test_a_request_can_be_cancelled_while_its_grammar_compiles(make_engine: MakeEngine) -> None:
    engine = make_engine()
    request = engine.submit(STORY, 8, sampling=Sampling(grammar=json_form({"type": "object"})))
    engine.engine.cancel(request)
    engine.run()
    assert engine.outcomes[request].finished.reason == "cancelled"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "grammar",
    [
        json_form({"$ref": "#"}),
        Grammar("regex", "a[^\\s\\S]"),
        Grammar("regex", "o?(((a{1000}){1000}){1000})"),
        Grammar("lark", "start: /o*/ T" + " a?" * 1900 + '\nT: "n"\na: "x"'),
    ],
)
def test_a_form_that_can_be_followed_no_further_is_an_error(make_engine: MakeEngine, grammar: Grammar) -> None:
    """An end token is all that such a form allows, so the answer would otherwise seem complete."""
    engine = make_engine()
    request = engine.submit(STORY, 30, sampling=Sampling(temperature=0.0, grammar=grammar))
    engine.run()
    finished = engine.outcomes[request].finished
    assert finished is not None
    assert (finished.reason, finished.error_type) == ("error", "validation_failed"), finished


def test_masks_that_take_long_are_made_in_a_thread_and_not_kept(make_engine: MakeEngine) -> None:
    """Such a form takes a node some 100 MB and 0.3 s for its first token."""
    engine = make_engine().engine
    assert engine.grammars is not None

    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before = resident_bytes()
    for number in range(6):
        form = Grammar("regex", f"(((a{{1000}}){{1000}}){{{1000 + number}}})")
        started = engine.grammars.start(form, [])
        while not started.ready:
            time.sleep(0.01)
    assert resident_bytes() - before < 300 << 20


def test_a_form_whose_masks_take_long_ends_its_request(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    monkeypatch.setattr(grammars, "MAX_STEP_SECONDS", 0.0)
    slow = engine.submit(STORY, 30, sampling=Sampling(grammar=Grammar("regex", "[a-z ]{20,}")))
    engine.run()
    finished = engine.outcomes[slow].finished
    assert finished is not None
    assert (finished.reason, finished.error_type) == ("error", "validation_failed")
    assert "processor time" in finished.error


def test_a_slow_form_is_not_tried_again_for_a_while(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    slow = Sampling(temperature=0.0, grammar=Grammar("regex", "[a-z ]{20,}"))

    def reason() -> str:
        request = engine.submit(STORY, 5, sampling=slow)
        engine.run()
        assert engine.outcomes[request].finished is not None
        return engine.outcomes[request].finished.reason

    with monkeypatch.context() as patch:
        patch.setattr(grammars, "MAX_STEP_SECONDS", 0.0)
        assert reason() == "error"
    assert reason() == "error"
    monkeypatch.setattr(grammars, "monotonic", lambda: time.monotonic() + grammars.REFUSED_SECONDS)
    assert reason() == "length"


def test_the_cache_of_forms_has_a_limit_in_bytes(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimate is compared with what the allocator has handed out."""
    compiler = make_engine().engine.grammars
    assert compiler is not None
    rng, before = random.Random(3), allocated_bytes()
    forms = [json_form(draw_schema(rng)) for _ in range(20)]
    forms += [
        Grammar("choice", json.dumps([f"word {number}" for number in range(1000)])),
        Grammar("regex", "[a-z]{900}"),
    ]
    kept = []
    for form in forms:
        kept.append(compiler.start(form, []))
        while not kept[-1].ready:
            time.sleep(0.001)
    assert allocated_bytes() - before < compiler.cached_bytes < grammars.CACHED_BYTES
    monkeypatch.setattr(grammars, "CACHED_BYTES", compiler.cached_bytes / 2)
    kept.append(compiler.start(json_form(draw_schema(rng)), []))
    while not kept[-1].ready:
        time.sleep(0.001)
    assert 0 < compiler.cached_bytes <= grammars.CACHED_BYTES


def allocated_bytes() -> int:
    """Returns what the C library's allocator has handed out in this process, in all threads."""

    class Info(ctypes.Structure):
        _fields_ = [(f"field{number}", ctypes.c_size_t) for number in range(10)]

    library = ctypes.CDLL(None)
    library.mallinfo2.restype = Info
    info = library.mallinfo2()
    return int(info.field4 + info.field7)
