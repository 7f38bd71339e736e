"""Requests cut anywhere, and gone on with on another engine: together they say what one engine says."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from cluster.messages import Adapter, Done, Event, GenerateRequest, Sampling, Token
from cluster.text import BaseText
from node_agent.api.detokenize import TokenText
from node_agent.api.reply import Reply
from node_agent.ipc import Generated
from tests.node_agent.served_node import request_of
from tests.support.local_engine import LocalEngine, MakeEngine

LENGTH = 24
CUTS, MORE_CUTS = 300, 2000
AT_ONCE = 50
SETTINGS = {"chunk_tokens": 24, "max_rows": 12, "block_tokens": 4, "queue_limit": 4 * AT_ONCE}


@dataclass
class Said:
    """What was told of one request."""

    tokens: list[Token]
    done: Done | None


@pytest.fixture(scope="module")
def tokens(stories_dir: Path) -> TokenText:
    return TokenText(BaseText(stories_dir))


def drawn_sampling(draw: random.Random, plain: list[int]) -> Sampling:
    """Every parameter by itself is off as often as on. They ask for what `plain`, a usual answer, has."""

    def one_of(*values: object) -> object:
        return draw.choice([None, *values])

    fields = {
        "temperature": one_of(0.0, 0.7, 1.3) or 0.0,
        "top_p": one_of(0.9),
        "top_k": one_of(40),
        "min_p": one_of(0.02),
        "choice": one_of(1, 5),
        "presence_penalty": one_of(1.5),
        "frequency_penalty": one_of(0.7),
        "logprobs": one_of(0, 2),
        "repetition_penalty": one_of(1.3, 0.8),
        "logit_bias": one_of({draw.choice(plain): 2.0}),
        "min_tokens": one_of(8),
        "stop_token_ids": one_of([draw.choice(plain)]),
        "bad_words": one_of([plain[3:5], [draw.choice(plain)]]),
        "include_stop": one_of(True),
        "skip_special_tokens": one_of(False),
    }
    stated = {name: value for name, value in fields.items() if value is not None}
    return Sampling(seed=draw.getrandbits(63), **stated)  # type: ignore[arg-type]


def drawn_request(draw: random.Random, text: TokenText, plain: list[int], adapter: Adapter | None) -> GenerateRequest:
    """Its stop strings may be said, in one token or across several, or never."""
    prompt = [1, *draw.choices(range(5, 512), k=draw.randrange(1, 40))]
    usual = text.decode(plain)
    pieces = [usual[at : at + size] for at, size in ((draw.randrange(len(usual)), draw.randrange(1, 8)),)]
    return request_of(
        token_ids=prompt,
        max_tokens=draw.randrange(10, LENGTH),
        sampling=drawn_sampling(draw, plain),
        stop=draw.choice([[], [" the"], ["e"], pieces, ["never said"]]),
        ignore_eos=draw.random() < 0.5,
        adapter=adapter,
    )


def submitted(engine: LocalEngine, request: GenerateRequest) -> str:
    return engine.submit(
        request.token_ids,
        request.max_tokens,
        request.adapter,
        request.sampling,
        ignore_eos=request.ignore_eos,
        generated=request.generated,
    )


def told(engine: LocalEngine, id: str, request: GenerateRequest, text: TokenText) -> Said:
    """As the node's API process tells it."""
    outcome, reply = engine.outcomes[id], Reply(request, "n", text, received=0.0)
    reply.resume(request.generated)
    assert outcome.finished is not None
    said = [Generated(id, *pair) for pair in zip(outcome.tokens, outcome.logprobs, strict=True)]
    events: list[Event | None] = [reply.translate(event) for event in [*said, outcome.finished]]
    done = events.pop()
    assert isinstance(done, Done), done
    return Said([event for event in events if isinstance(event, Token)], done)


def ran(engine: LocalEngine, requests: list[GenerateRequest], text: TokenText) -> list[Said]:
    ids = [submitted(engine, request) for request in requests]
    engine.run()
    return [told(engine, id, request, text) for id, request in zip(ids, requests, strict=True)]


def cut(request: GenerateRequest, sent: list[Token]) -> GenerateRequest:
    generated = [token_id for token in sent for token_id in token.token_ids]
    sampling = msgspec.structs.replace(request.sampling, prompt_logprobs=None)
    return msgspec.structs.replace(request, generated=generated, sampling=sampling)


def assert_same(whole: Said, parts: Said) -> None:
    """Log probabilities but for what their computation in other batches makes of the last bits."""
    assert whole.done is not None and parts.done is not None
    bare = [[msgspec.structs.replace(token, logprobs=[]) for token in said.tokens] for said in (whole, parts)]
    assert bare[0] == bare[1]
    for left, right in zip(whole.tokens, parts.tokens, strict=True):
        assert [entry.token_id for entry in left.logprobs] == [entry.token_id for entry in right.logprobs]
        for one, other in zip(left.logprobs, right.logprobs, strict=True):
            assert abs(one.logprob - other.logprob) < 1e-3
            assert len(one.top) == len(other.top)
    for field in ("finish_reason", "prompt_tokens", "completion_tokens", "text", "stop_reason"):
        assert getattr(whole.done, field) == getattr(parts.done, field), field


def check_cuts(engines: list[LocalEngine], adapters: list[Path], text: TokenText, count: int, seed: int) -> None:
    """The first engine says all; the others go on behind drawn places, one after the other."""
    draw = random.Random(seed)
    functions = [None, *{engine.deploy(adapters[0]) for engine in engines}]
    first, *others = engines
    plain = ran(first, [request_of(token_ids=[1, 403, 407], max_tokens=LENGTH, sampling=Sampling(0.0))], text)[0]
    usual = [token_id for token in plain.tokens for token_id in token.token_ids]
    for _ in range(0, count, AT_ONCE):
        requests = [drawn_request(draw, text, usual, draw.choice(functions)) for _ in range(AT_ONCE)]
        wholes = ran(first, requests, text)
        sent: list[list[Token]] = [[] for _ in requests]
        ends: list[Said] = wholes
        for engine in others:
            # Also behind the last token: then only the end was not told.
            sent = [
                [*before, *end.tokens[: draw.randrange(0 if before else 1, len(end.tokens) + 1)]]
                for before, end in zip(sent, ends, strict=True)
            ]
            ends = ran(engine, [cut(*pair) for pair in zip(requests, sent, strict=True)], text)
        for whole, before, end in zip(wholes, sent, ends, strict=True):
            assert_same(whole, Said([*before, *end.tokens], end.done))


def test_drawn_cuts(make_engine: MakeEngine, drawn_adapters: list[Path], tokens: TokenText) -> None:
    check_cuts([make_engine(**SETTINGS) for _ in range(2)], drawn_adapters, tokens, CUTS, 1)


def test_drawn_cuts_of_what_was_cut(make_engine: MakeEngine, drawn_adapters: list[Path], tokens: TokenText) -> None:
    check_cuts([make_engine(**SETTINGS) for _ in range(3)], drawn_adapters, tokens, 100, 2)


@pytest.mark.slow
def test_many_drawn_cuts(make_engine: MakeEngine, drawn_adapters: list[Path], tokens: TokenText) -> None:
    check_cuts([make_engine(**SETTINGS) for _ in range(3)], drawn_adapters, tokens, MORE_CUTS, 3)


def test_a_failure_behind_the_tokens_of_another_node_is_retryable(tokens: TokenText) -> None:
    """None was computed here; once one is, it is not."""
    reply = Reply(request_of(generated=[403, 407]), "n", tokens, received=0.0)
    reply.resume([403, 407])
    assert reply.fail("overloaded", "full").retryable
    reply.translate(Generated("r1", 403))
    assert not reply.fail("overloaded", "full").retryable
