"""A pass for which there is too little memory costs its requests time, or one of them its answer; never the engine."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from node_agent.device import is_out_of_memory, unless_out_of_memory
from node_agent.engine.hot import GROWS_AFTER, PassSize
from node_agent.engine.rows import Row
from node_agent.types import Pass, PassLora, StepBatch
from tests.node_agent.test_preemption import SEEDED
from tests.support.exact import Case, Tally, check
from tests.support.local_engine import LocalEngine, MakeEngine
from tests.support.peft_reference import PeftReference

STORY = [1, 403, 407, 261]
TOO_LARGE = 1 << 60


def allocate_by_torch() -> None:
    torch.empty(TOO_LARGE, dtype=torch.uint8)


def allocate_by_python() -> None:
    bytearray(TOO_LARGE)


def allocate_by_cuda() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


ALLOCATIONS = [allocate_by_torch, allocate_by_python, allocate_by_cuda]
PLACES = {"start": -1, "amid": 2, "end": 5}
"""Layers, as Short has them."""


class Short:
    """A runner's passes run out of memory in their `layer`s (-1: before the first) when `wants` says so."""

    def __init__(
        self, engine: LocalEngine, allocate: Callable[[], None], wants: Callable[[StepBatch], bool], layer: int
    ) -> None:
        self.times = 0
        runner = engine.engine.runner
        start, short = runner.start, self

        def started(batch: StepBatch, lora: PassLora | None) -> Pass:
            if layer < 0 and wants(batch):
                short.times += 1
                allocate()
            run = start(batch, lora)
            advance, finish = run.advance, run.finish

            def advancing(to_layer: int) -> None:
                if run.layer <= layer < to_layer and wants(batch):
                    short.times += 1
                    allocate()
                advance(to_layer)

            def finishing() -> object:
                if layer == runner.num_layers and wants(batch):
                    short.times += 1
                    allocate()
                return finish()

            run.advance, run.finish = advancing, finishing  # type: ignore[method-assign, assignment]
            return run

        runner.start = started  # type: ignore[method-assign]


def test_what_counts_as_too_little_memory() -> None:
    for allocate in ALLOCATIONS:
        with pytest.raises((RuntimeError, MemoryError)) as found:
            allocate()
        assert is_out_of_memory(found.value)
        assert unless_out_of_memory(allocate) is None
    with pytest.raises(RuntimeError, match="shape"):
        unless_out_of_memory(lambda: torch.ones(3).view(2))
    assert unless_out_of_memory(lambda: 3) == 3


@pytest.mark.parametrize(
    ("allocate", "layer"),
    [
        pytest.param(allocate, layer, marks=[] if number == place else pytest.mark.slow)
        for number, allocate in enumerate(ALLOCATIONS)
        for place, layer in enumerate(PLACES.values())
    ],
)
def test_requests_are_answered_in_smaller_passes(
    make_engine: MakeEngine, drawn_adapters: list[Path], reference: PeftReference,
    allocate: Callable[[], None], layer: int,
) -> None:  # fmt: skip
    """Their tokens are those of PEFT, as if there had been memory enough."""
    engine, rng = make_engine(max_rows=8, chunk_tokens=64), random.Random(layer)
    cases = [Case(path, engine.deploy(path), [1], 0) for path in drawn_adapters[:3]] + [Case(None, None, [1], 0)]
    short = Short(engine, allocate, lambda batch: batch.n_tokens > 5, layer)
    sent: dict[str, Case] = {}
    for i in range(8):
        kind, prompt = cases[i % 4], [1, *(rng.randrange(3, 500) for _ in range(rng.randint(0, 30)))]
        case = Case(kind.directory, kind.adapter, prompt, 10)
        sent[engine.submit(prompt, 10, kind.adapter, ignore_eos=True)] = case
    engine.run()
    assert short.times
    problems: list[str] = []
    for request, case in sent.items():
        finished = engine.outcomes[request].finished
        assert finished is not None and finished.reason == "length"
        problems += check(engine, reference, case, engine.outcomes[request].tokens, Tally())
    assert not problems
    assert not engine.engine.cold.replays, "no worker failed"


@pytest.mark.parametrize("layer", PLACES.values(), ids=PLACES)
def test_a_request_that_is_too_much_alone_fails_alone(make_engine: MakeEngine, layer: int) -> None:
    engine = make_engine(max_rows=8)
    alone = [engine.submit(STORY, 20, sampling=SEEDED, ignore_eos=True) for _ in range(3)]
    engine.run()
    bad_token = 499
    short = Short(engine, allocate_by_torch, lambda batch: bad_token in batch.token_ids.tolist(), layer)
    bad = engine.submit([1, 20, 30, bad_token, 40], 20, ignore_eos=True)
    good = [engine.submit(STORY, 20, sampling=SEEDED, ignore_eos=True) for _ in range(3)]
    engine.run()
    finished = engine.outcomes[bad].finished
    assert finished is not None
    assert (finished.reason, finished.error_type) == ("error", "unavailable")
    assert "memory" in finished.error
    assert engine.results(good) == engine.results(alone)
    assert short.times < 8
    engine.assert_clean()


def test_a_call_that_goes_before_a_batch_finds_too_little_memory(make_engine: MakeEngine) -> None:
    from tests.node_agent.test_floods import flooded

    engine = make_engine(max_rows=16)
    flooded(engine)
    Short(engine, allocate_by_torch, lambda batch: batch.n_tokens > 20, 1)
    call = engine.submit([1, *range(10, 50)], 2, tenant="v0", ignore_eos=True)
    engine.run(until=lambda: engine.outcomes[call].finished is not None)
    assert len(engine.outcomes[call].tokens) == 2
    engine.end()


def rows_of(lengths: list[int]) -> list[Row]:
    return [Row(object(), length) for length in lengths]  # type: ignore[arg-type]


def test_a_pass_is_halved_and_grows_again() -> None:
    size, rows = PassSize(), rows_of([1, 1, 1, 20])
    assert size.cut(rows, 3) == (rows, 3)
    size.shrink(23)
    seen: dict[int, int] = {}
    for _ in range(8):
        cut, n_decode = size.cut(rows, 3)
        assert sum(row.length for row in cut) <= 11
        assert all(row.length == 1 for row in cut[:n_decode])
        for row in cut:
            seen[id(row.request)] = seen.get(id(row.request), 0) + 1
    assert len(seen) == 4 and min(seen.values()) >= 4, "all have their turns"
    for _ in range(2 * GROWS_AFTER):
        size.grow()
    assert size.cut(rows, 3) == (rows, 3)
    for _ in range(10):
        size.shrink(23)
    assert [(len(cut), cut[0].length) for cut, _ in (size.cut(rows, 3) for _ in range(5))] == [(1, 1)] * 5
