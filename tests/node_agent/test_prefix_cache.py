"""Requests that begin as an earlier one of their tenant and adapter did compute the rest alone, and say the same."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from cluster.messages import Adapter, Sampling
from node_agent.engine.prefixes import WORTH_WAITING
from tests.support.exact import Case, Tally, check
from tests.support.local_engine import LocalEngine, MakeEngine
from tests.support.peft_reference import PeftReference, make_adapter

PROMPT = [1, *range(60, 100)]
BLOCK_BYTES = 2 * 5 * 4 * 8 * 4 * 4
"""Of 4 tokens of stories260K in fp32."""


def computed(engine: LocalEngine) -> list[int]:
    """How many tokens each pass has from now on."""
    lengths: list[int] = []
    start = engine.engine.runner.start

    def counted(batch, lora):  # type: ignore[no-untyped-def]
        lengths.append(batch.n_tokens)
        return start(batch, lora)

    engine.engine.runner.start = counted  # type: ignore[method-assign]
    return lengths


def cached(engine: LocalEngine, requests: list[str]) -> list[int]:
    return [engine.outcomes[request].cached_tokens for request in requests]


@pytest.mark.parametrize("adapted", [False, True], ids=["base", "adapter"])
def test_the_same_beginning_is_computed_once(
    make_engine: MakeEngine, drawn_adapters: list[Path], reference: PeftReference, adapted: bool
) -> None:
    """Also while the first one goes on, and when the answer has become part of the next prompt."""
    engine = make_engine(block_tokens=4)
    path = drawn_adapters[0] if adapted else None
    adapter = engine.deploy(path) if path is not None else None
    first = engine.submit(PROMPT, 12, adapter, ignore_eos=True)
    engine.run(until=lambda: len(engine.outcomes[first].tokens) == 3)
    lengths = computed(engine)
    beside = engine.submit([*PROMPT[:30], 7, 8], 12, adapter, ignore_eos=True)
    engine.run(until=lambda: bool(engine.outcomes[beside].tokens))
    assert sum(lengths) <= 4 + 2 * 3, "of 32 tokens 28 are there"
    engine.run()
    turn = [*PROMPT, *engine.outcomes[first].tokens, 50, 51]
    last = engine.submit(turn, 12, adapter, ignore_eos=True)
    engine.run()
    assert cached(engine, [first, beside, last]) == [0, 28, 52]
    for prompt, request in ((PROMPT, first), ([*PROMPT[:30], 7, 8], beside), (turn, last)):
        assert not check(engine, reference, Case(path, adapter, prompt, 12), engine.outcomes[request].tokens, Tally())


def test_a_salt_separates_the_users_of_a_tenant(make_engine: MakeEngine) -> None:
    engine = make_engine(block_tokens=4)
    found = []
    for salt in ("", "a", "b", "a", ""):
        request = engine.submit(PROMPT, 2, sampling=Sampling(temperature=0.0, cache_salt=salt), ignore_eos=True)
        engine.run()
        found.append(engine.outcomes[request].cached_tokens)
    assert found == [0, 0, 0, 40, 40]


def test_callers_of_one_text_fit_beside_each_other(make_engine: MakeEngine, reference: PeftReference) -> None:
    """Each has 14 blocks, 12 of them the text's, and there are 20."""
    engine = make_engine(block_tokens=4, kv_memory=21 * BLOCK_BYTES)
    text = [1, *range(60, 107)]
    prompts = [[*text, 5 + i] for i in range(4)]
    first = engine.submit(prompts[0], 7, ignore_eos=True)
    engine.run(until=lambda: bool(engine.outcomes[first].tokens))
    others = [engine.submit(prompt, 7, ignore_eos=True) for prompt in prompts[1:]]
    engine.run(until=lambda: len(engine.engine.running) == 4)
    assert engine.engine.blocks.free == 20 - 12 - 4 * 2
    other = engine.submit([7, *text], 7, ignore_eos=True)
    engine.step()
    assert not engine.outcomes[other].admitted
    engine.run()
    for prompt, request in zip([*prompts, [7, *text]], [first, *others, other], strict=True):
        assert not check(engine, reference, Case(None, None, prompt, 7), engine.outcomes[request].tokens, Tally())


@pytest.mark.parametrize(("max_tokens", "preemptions"), [(7, 0), (28, 1)])
def test_a_strict_call_takes_no_place_for_what_it_finds(
    make_engine: MakeEngine, reference: PeftReference, max_tokens: int, preemptions: int
) -> None:
    """It begins as best effort does that has 14 of 20 blocks: two more are enough, eight are not there."""
    engine = make_engine(block_tokens=4, kv_memory=21 * BLOCK_BYTES)
    text = [1, *range(60, 107)]
    cheap = engine.submit([*text, 5], 7, ignore_eos=True, tenant="a", slo_class="best_effort")
    engine.run(until=lambda: bool(engine.outcomes[cheap].tokens))
    call = engine.submit([*text, 6], max_tokens, ignore_eos=True, tenant="a", slo_class="strict")
    engine.step()
    assert engine.outcomes[call].admitted
    engine.run()
    finished = engine.outcomes[cheap].finished
    assert finished is not None
    assert finished.preemptions == preemptions
    for last, tokens, request in ((5, 7, cheap), (6, max_tokens, call)):
        case = Case(None, None, [*text, last], tokens)
        assert not check(engine, reference, case, engine.outcomes[request].tokens, Tally())


@pytest.mark.parametrize(("length", "blocks"), [(4, 32), (12, 38)])
def test_a_strict_call_that_wants_a_row_takes_one_place(make_engine: MakeEngine, length: int, blocks: int) -> None:
    """It finds twelve of its fourteen blocks with a standard call, and three are free."""
    engine = make_engine(max_rows=4, block_tokens=4, kv_memory=(1 + blocks) * BLOCK_BYTES)
    text = [1, *range(60, 107)]
    standard = engine.submit([*text, 5], 40, ignore_eos=True, tenant="a")
    engine.run(until=lambda: bool(engine.outcomes[standard].tokens))
    cheap = [
        engine.submit([7, 8, 9, 10], length, ignore_eos=True, tenant="c", slo_class="best_effort") for _ in range(3)
    ]
    engine.run(until=lambda: len(engine.engine.running) == 4)
    requests = [engine.engine.running[request] for request in cheap]
    call = engine.submit([*text, 6], 7, ignore_eos=True, tenant="a", slo_class="strict")
    engine.step()
    assert engine.outcomes[call].admitted
    assert sum(request.preemptions for request in requests) == 1
    engine.run()


def test_tenants_and_adapters_share_nothing(make_engine: MakeEngine, drawn_adapters: list[Path]) -> None:
    engine = make_engine(block_tokens=4)
    adapters: list[Adapter | None] = [None, *(engine.deploy(path) for path in drawn_adapters[:2])]
    requests: list[str] = []
    for adapter in adapters:
        for tenant in ("a", "b"):
            requests.append(engine.submit(PROMPT, 2, adapter, tenant=tenant))
            engine.run()
    assert cached(engine, requests) == [0] * 6
    again = [engine.submit(PROMPT, 2, adapter, tenant="b") for adapter in adapters]
    engine.run()
    assert cached(engine, again) == [40] * 3
    assert engine.results(again) == engine.results(requests[1::2])


def test_scores_of_a_prompt_are_all_computed(make_engine: MakeEngine) -> None:
    engine = make_engine(block_tokens=4)
    requests = []
    for _ in range(2):
        requests.append(engine.submit(PROMPT, 2, sampling=Sampling(temperature=0.0, prompt_logprobs=1)))
        engine.run()
    assert cached(engine, requests) == [0, 0]
    scores = [engine.outcomes[request].prompt_scores for request in requests]
    assert len(scores[0]) == len(PROMPT) - 1 and scores[0] == scores[1]


def test_what_was_not_finite_is_not_found_again(make_engine: MakeEngine, stories_dir: Path, tmp_path: Path) -> None:
    engine = make_engine(block_tokens=4, chunk_tokens=16)
    adapter = engine.deploy(overflowing(stories_dir, tmp_path / "huge"))
    requests = []
    for _ in range(2):
        requests.append(engine.submit(PROMPT, 4, adapter))
        engine.run()
        finished = engine.outcomes[requests[-1]].finished
        assert finished is not None and finished.error_type == "internal"
    assert cached(engine, requests) == [0, 0]


def overflowing(model_dir: Path, directory: Path) -> Path:
    """An adapter whose weights are finite, and what they are multiplied to is not."""
    make_adapter(model_dir, directory, 1, r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    file = directory / "adapter_model.safetensors"
    save_file({name: tensor * 1e30 for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
    return directory


def test_off_keeps_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine(block_tokens=4, prefix_cache="off")
    requests = []
    for _ in range(2):
        requests.append(engine.submit(PROMPT, 4))
        engine.run()
    assert cached(engine, requests) == [0, 0] and engine.results(requests[:1]) == engine.results(requests[1:])


LONG = [1, *range(60, 60 + WORTH_WAITING + 20)]


def test_calls_that_come_together_compute_their_beginning_once(
    make_engine: MakeEngine, drawn_adapters: list[Path], reference: PeftReference
) -> None:
    """Also when the one that does so ends early: another takes its place."""
    engine = make_engine(chunk_tokens=32)
    path = drawn_adapters[0]
    adapter = engine.deploy(path)
    for cancelled in (False, True):
        lengths = computed(engine)
        prompts = [[9 + cancelled, *LONG, 5, 6 + i] for i in range(6)]
        requests = [engine.submit(prompt, 2, adapter, ignore_eos=True) for prompt in prompts]
        engine.run(until=lambda: sum(lengths) >= 64)  # noqa: B023
        assert sum(bool(engine.outcomes[request].admitted) for request in requests) == 1
        if cancelled:
            engine.engine.cancel(requests.pop(0))
            del prompts[0]
        engine.run()
        assert sum(lengths) < 2 * len(LONG) + 6 * 32, "each by itself: six times as many as there are"
        assert all(engine.outcomes[request].cached_tokens >= WORTH_WAITING for request in requests[1:])
        for prompt, request in zip(prompts, requests, strict=True):
            assert not check(engine, reference, Case(path, adapter, prompt, 2), engine.results([request])[0], Tally())


def test_nobody_waits_for_one_that_is_less_urgent_or_of_another(make_engine: MakeEngine) -> None:
    engine = make_engine(chunk_tokens=16)
    lazy = engine.submit([*LONG, 5], 2, tenant="a", slo_class="best_effort")
    engine.run(until=lambda: bool(engine.outcomes[lazy].admitted))
    requests = [
        engine.submit([*LONG, 6], 2, tenant="a"),
        engine.submit([*LONG, 7], 2, tenant="b"),
        engine.submit([*LONG[: WORTH_WAITING - 16], 8], 2, tenant="b"),
        engine.submit([*LONG, 8], 2, tenant="b", sampling=Sampling(temperature=0.0, prompt_logprobs=0)),
    ]
    waits = [engine.submit([*LONG, 9], 2, tenant=tenant) for tenant in "ab"]
    engine.step()
    assert all(engine.outcomes[request].admitted for request in requests)
    assert not any(engine.outcomes[request].admitted for request in waits)
    engine.run()
    assert all(len(tokens) == 2 for tokens in engine.results([lazy, *requests, *waits]))


def test_a_long_text_that_mostly_is_another_is_not_waited_for(make_engine: MakeEngine) -> None:
    engine = make_engine(chunk_tokens=16)
    long = engine.submit([*LONG, *range(60, 260)], 2)
    engine.run(until=lambda: bool(engine.outcomes[long].admitted))
    short = engine.submit([*LONG[:140], 5], 2)
    engine.step()
    assert engine.outcomes[short].admitted
    engine.run()


def test_who_waits_for_a_beginning_is_no_flood(make_engine: MakeEngine) -> None:
    """There are rows for all of them; so the prompt that they wait for is not cut for others' sake."""
    engine = make_engine(max_rows=16, chunk_tokens=64)
    engine.submit([1, 2, 3], 1, tenant="other")
    engine.run()
    lengths = computed(engine)
    requests = [engine.submit([*LONG, 5, 6 + i], 2, tenant="many") for i in range(8)]
    engine.step()
    assert len(engine.engine.queue) == 7 and engine.engine.scheduler.reserves(16).crowded
    engine.step()
    assert lengths == [64, 64]
    engine.run()
    assert all(len(tokens) == 2 for tokens in engine.results(requests))


@pytest.mark.parametrize("seed", range(4))
def test_drawn_conversations_in_little_memory(
    make_engine: MakeEngine, drawn_adapters: list[Path], reference: PeftReference, seed: int
) -> None:
    """Turns of conversations that share beginnings, of all classes, some cancelled, in a cache that holds few of them:
    blocks are forgotten, shared and taken from others all the time, and each text is PEFT's."""
    rng = random.Random(seed)
    engine = make_engine(block_tokens=4, kv_memory=BLOCK_BYTES * 80, max_rows=4, chunk_tokens=rng.choice([5, 16, 512]))
    paths = [None, drawn_adapters[0]]
    kinds = [(path, engine.deploy(path) if path is not None else None) for path in paths]
    begins = [[1, *(rng.randrange(3, 400) for _ in range(rng.randint(5, 30)))] for _ in range(2)]
    chats = [(kind, list(rng.choice(begins))) for kind in kinds for _ in range(3)]
    told: list[tuple[Case, str]] = []
    for _ in range(4):
        turns = []
        for (path, adapter), text in rng.sample(chats, rng.randint(2, 6)):
            if len(text) > 80:
                del text[20:]
            text += [rng.randrange(3, 400) for _ in range(rng.randint(1, 6))]
            case = Case(path, adapter, list(text), rng.randint(1, 20))
            slo = rng.choice(["strict", "standard", "best_effort", "best_effort"])
            request = engine.submit(
                case.prompt, case.max_tokens, adapter, tenant=rng.choice("ab"), slo_class=slo, ttft=5.0, ignore_eos=True
            )
            for _ in range(rng.randint(0, 4)):
                engine.step()
            if rng.random() < 0.1:
                engine.engine.cancel(request)
            else:
                turns.append((case, request, text))
        engine.run()
        engine.assert_clean()
        for case, request, text in turns:
            text += engine.outcomes[request].tokens
            told.append((case, request))
    assert sum(cached(engine, [request for _, request in told])) > 0
    for case, request in told:
        assert len(engine.outcomes[request].tokens) == case.max_tokens
        assert not check(engine, reference, case, engine.outcomes[request].tokens, Tally())
