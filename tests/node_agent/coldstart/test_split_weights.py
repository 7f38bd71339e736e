"""Workers that split the weights of few tokens: whole and exact sums, with the same bits every time, whoever fails."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.compiled import COLUMNS
from node_agent.coldstart import slices, worker_start
from node_agent.coldstart.handoffs import Handoff, Part
from node_agent.coldstart.keeper import WorkerState
from node_agent.coldstart.product import Product
from node_agent.coldstart.shared import DTYPES, MAX_RANK, Layout
from node_agent.coldstart.slices import MIN_SHARE, Segment, cut_columns, cut_rows
from node_agent.coldstart.workers import WorkerPool
from node_agent.cores import spare_cores
from node_agent.types import GROUPS
from tests.node_agent.coldstart.pools import (
    LONG,
    MAX_TOKENS,
    WIDTHS,
    counted,
    crowded,
    draw_x,
    eventually,
    is_right,
    poison,
    state,
)
from tests.support.crowded import make_crowded_pool
from tests.support.drawn_batches import run_batch
from tests.support.exact import Case, Tally
from tests.support.forced import force
from tests.support.host_case import HostCase, draw_host
from tests.support.local_engine import MakeEngine
from tests.support.peft_reference import PeftReference
from tests.support.worker_counters import counters_of

SLOTS, WORKERS = 6, 4


def uneven_case(dtype: torch.dtype) -> HostCase:
    """Six adapters of one layer, ranks 0 to 512 that differ between projections; the last one has rank 1 alone, less
    than there are workers."""
    ranks = np.random.default_rng(11).choice([0, 1, 3, 16, 33, 200, MAX_RANK], size=(SLOTS, 1, 7))
    ranks[0, 0, :3] = (MAX_RANK, 0, 3)
    ranks[SLOTS - 1] = [[0, 1, 0, 1, 0, 1, 1]]
    return draw_host(WIDTHS, ranks, dtype, seed=4)


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def case(request: pytest.FixtureRequest) -> Iterator[HostCase]:
    made = uneven_case(request.param)
    yield made
    made.close()


@given(
    tokens=st.integers(1, 80),
    slot=st.integers(0, SLOTS - 1),
    group=st.integers(0, 3),
    shares=st.integers(1, 14),
    compiled=st.booleans(),
)
def test_shares_make_the_whole(case: HostCase, tokens: int, slot: int, group: int, shares: int, compiled: bool) -> None:
    layout = Layout(1, 1, MAX_TOKENS, WIDTHS, DTYPES.index(case.host.torch_dtype))
    product, (d_in, widths) = Product(case.weights, layout, compiled), layout.group_widths(group)
    x, ranks = draw_x(tokens, d_in, layout.torch_dtype, slot), product.ranks(slot, 0, group)
    xa = torch.full((tokens, len(widths), MAX_RANK), torch.nan)
    ys = [torch.full((tokens, width), torch.nan, dtype=layout.torch_dtype) for width in widths]
    for share in range(shares):
        product.shrink(xa, x, slot, 0, group, cut_rows(ranks, share, shares))
    for share in range(shares):
        product.expand(ys, xa, slot, 0, group, cut_columns(widths, ranks, share, shares, COLUMNS))
    assert is_right(SimpleNamespace(outputs=ys), case, x, slot, 0, list(GROUPS)[group])  # type: ignore[arg-type]
    if compiled and tokens < 8:
        whole = [torch.full_like(y, torch.nan) for y in ys]
        product.compute(whole, x, slot, 0, group)
        assert all(torch.equal(one, other) for one, other in zip(ys, whole, strict=True)), "not one bit differs"


@pytest.fixture(scope="module")
def uneven() -> Iterator[HostCase]:
    made = uneven_case(torch.bfloat16)
    yield made
    made.close()


@pytest.fixture(scope="module")
def pool(uneven: HostCase, soon_again: None) -> Iterator[WorkerPool]:
    """Workers that sleep between two tests."""
    with crowded(uneven, WORKERS) as made:
        made.disarm()
        yield made


@pytest.fixture(autouse=True)
def _armed(request: pytest.FixtureRequest) -> Iterator[None]:
    """Arms the pool of a test that has it: all workers, and no slot in quarantine."""
    if "pool" not in request.fixturenames:
        yield
        return
    pool: WorkerPool = request.getfixturevalue("pool")
    assert pool.wait_ready(LONG) == WORKERS
    eventually(lambda: not counters_of(pool).in_quarantine)
    pool.arm()
    yield
    pool.disarm()


def split(pool: WorkerPool, x: torch.Tensor, drawn: list[tuple[int, int]], group: str, shares: int) -> Handoff:
    """A handoff of rows of adapters (slot, tokens), whose weights are as many as make so many shares."""
    elements = -(-shares * MIN_SHARE // len(drawn))
    segments = [Segment(slot, tokens, MAX_TOKENS * len(drawn), elements) for slot, tokens in drawn]
    handoff = pool.open(x, segments, 0, group)
    assert handoff is not None and len(handoff._parts) == shares
    return handoff


def poison_all(pool: WorkerPool) -> None:
    poison(pool)
    for slot in range(pool.layout.slots):
        pool.memory.xa(slot, pool.layout.split_tokens, 3).fill_(torch.nan)


def all_right(handoff: Handoff, case: HostCase, x: torch.Tensor, drawn: list[tuple[int, int]], group: str) -> bool:
    ends = list(itertools.accumulate(tokens for _, tokens in drawn))
    return all(
        is_right(
            SimpleNamespace(outputs=[y[end - tokens : end] for y in handoff.outputs]),  # type: ignore[arg-type]
            case, x[end - tokens : end], slot, 0, group,
        )
        for (slot, tokens), end in zip(drawn, ends, strict=True)
    )  # fmt: skip


DRAWN = st.lists(st.tuples(st.integers(0, SLOTS - 1), st.integers(1, 20)), min_size=1, max_size=4)


@given(drawn=DRAWN, group=st.sampled_from(list(GROUPS)), shares=st.integers(1, WORKERS))
def test_drawn(uneven: HostCase, pool: WorkerPool, drawn: list[tuple[int, int]], group: str, shares: int) -> None:
    """Rows of one adapter, or of several, among one to four workers; twice, over other remains in the memory."""
    x = draw_x(sum(tokens for _, tokens in drawn), WIDTHS[GROUPS[group][0]][0], torch.bfloat16, len(drawn))
    found = []
    for turn in range(2):
        if not turn:
            poison_all(pool)
        handoff = split(pool, x, drawn, group, shares)
        assert handoff.wait(LONG) and all_right(handoff, uneven, x, drawn, group)
        found.append([y.clone() for y in handoff.outputs])
        handoff.close()
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_slowed_workers_answer_the_same(uneven: HostCase, pool: WorkerPool) -> None:
    x, drawn = draw_x(5, 40, torch.bfloat16), [(0, 2), (2, 3)]
    pool.memory.repeats = 3
    handoff = split(pool, x, drawn, "qkv", 4)
    assert handoff.wait(LONG) and all_right(handoff, uneven, x, drawn, "qkv")
    handoff.close()
    pool.memory.repeats = 1


def test_only_free_workers_split(uneven: HostCase, pool: WorkerPool) -> None:
    x, segment = draw_x(1, 40, torch.bfloat16), Segment(0, 1, 1, 100 * MIN_SHARE)
    first = split(pool, x, [(0, 1)], "qkv", 2)
    others = [pool.open(x, [segment], 0, "qkv") for _ in range(2)]
    assert [len(handoff._parts) for handoff in others if handoff] == [2, 1]
    for handoff in (first, *others):
        assert handoff is not None and handoff.wait(LONG) and all_right(handoff, uneven, x, [(0, 1)], "qkv")
        handoff.close()


@contextlib.contextmanager
def stopped(pids: list[int]) -> Iterator[None]:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        eventually(lambda: all(state(pid) == "T" for pid in pids))
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize(("fault", "counts"), [(signal.SIGSTOP, (1, 3, 4)), (signal.SIGKILL, (2,))])
def test_a_share_that_does_not_come(
    uneven: HostCase, pool: WorkerPool, fault: signal.Signals, counts: tuple[int, ...]
) -> None:
    """Another worker computes the whole slice, or the handoff fails; what comes late changes nothing."""
    x, drawn, usual = draw_x(4, 40, torch.bfloat16), [(0, 1), (3, 3)], pool.takeover_ns
    before = counters_of(pool)
    for failing in counts:
        pool.takeover_ns = 500_000_000 if failing < WORKERS else 50_000_000
        poison_all(pool)
        pids = pool.pids()[-failing:]
        with stopped(pids):
            handoff = split(pool, x, drawn, "qkv", WORKERS)
            if fault is signal.SIGKILL:
                for pid in pids:
                    os.kill(pid, fault)
            found = check_answer(handoff, uneven, x, drawn, anybody_left=failing < WORKERS)
            handoff.close()
        eventually(lambda: counters_of(pool).in_quarantine == 0)
        assert all(torch.equal(*pair) for pair in found), "late answers change nothing"
        pool.disarm()
        assert pool.wait_ready(LONG) == WORKERS
        pool.arm()
        pool.takeover_ns = usual
        handoff = split(pool, x, drawn, "qkv", WORKERS)
        assert handoff.wait(LONG) and all_right(handoff, uneven, x, drawn, "qkv")
        handoff.close()
    assert counted(pool, before).takeovers == len(counts) - (WORKERS in counts)


def check_answer(
    handoff: Handoff, case: HostCase, x: torch.Tensor, drawn: list[tuple[int, int]], anybody_left: bool
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns the answer's tensors, each with a copy."""
    if not anybody_left:
        assert not handoff.wait(0.2), "it fails within its bound"
        return []
    assert handoff.wait(LONG) and all_right(handoff, case, x, drawn, "qkv")
    assert handoff._views[-1][:, -1].isnan().all(), "what the last worker was to compute is nobody else's to write"
    return [(y, y.clone()) for y in handoff.outputs]


@pytest.mark.parametrize(("seed", "wanted"), [(0, 60), pytest.param(1, 600, marks=pytest.mark.slow)])
def test_failing_at_any_point(uneven: HostCase, pool: WorkerPool, seed: int, wanted: int) -> None:
    """Every handoff is right or fails; never a wrong number, never a wait without an end."""
    draw, done, before, usual = random.Random(seed), threading.Event(), counters_of(pool), pool.takeover_ns
    pool.takeover_ns = 50_000_000

    def fail() -> None:
        kills = 0
        while not done.wait(draw.random() * 0.1):
            pids = pool.pids()
            if len(pids) == WORKERS:
                with contextlib.suppress(ProcessLookupError):
                    pid = draw.choice(pids)
                    if kills < 3 and draw.random() < 0.2:
                        kills += 1
                        os.kill(pid, signal.SIGKILL)
                    else:
                        os.kill(pid, signal.SIGSTOP)
                        done.wait(draw.choice((0.002, 0.1)))
                        os.kill(pid, signal.SIGCONT)

    failing = threading.Thread(target=fail)
    failing.start()
    right = shared = 0
    try:
        while right < wanted or not counted(pool, before).takeovers:
            drawn = [(draw.randrange(SLOTS), draw.randint(1, 4)) for _ in range(draw.randint(1, 2))]
            x = draw_x(sum(tokens for _, tokens in drawn), 40, torch.bfloat16, draw.randrange(99))
            segments = [Segment(slot, tokens, 99, 3 * MIN_SHARE) for slot, tokens in drawn]
            handoff = pool.open(x, segments, 0, "qkv")
            if handoff is not None:
                if handoff.wait(LONG):
                    assert all_right(handoff, uneven, x, drawn, "qkv")
                    right, shared = right + 1, shared + (len(handoff._parts) > 1)
                handoff.close()
    finally:
        done.set()
        failing.join()
        pool.takeover_ns = usual
    assert shared
    eventually(lambda: counters_of(pool).in_quarantine == 0)


@pytest.mark.skipif(not spare_cores(1), reason="a CPU worker needs a core beside the engine's")
def test_an_engine_with_drawn_plans_and_faults(
    make_engine: MakeEngine, reference: PeftReference, drawn_adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are PEFT's alone."""
    monkeypatch.setattr(slices, "MIN_SHARE", 1)
    monkeypatch.setattr(worker_start, "make_pool", make_crowded_pool)
    engine = make_engine(cpu_workers=1, adapter_memory=2 << 20, max_rows=16, block_tokens=4)
    assert engine.engine.assist is not None
    written, counts = engine.engine.assist.workers.write, Counter[bool]()

    def write(at: int, workers: Sequence[WorkerState], *given: Any) -> list[Part]:
        counts[given[-1]] += 1
        return written(at, workers, *given)

    monkeypatch.setattr(engine.engine.assist.workers, "write", write)
    forced = force(engine.engine, random.Random(8), faults=0.03)
    rng, tally, seen = random.Random(7), Tally(), Counter[str]()
    kinds = [Case(None, None, [], 0), *(Case(path, engine.deploy(path), [], 0) for path in drawn_adapters)]
    problems: list[str] = []
    # A worker that gets no core for long computes nothing, so a busy host needs more cases.
    while tally.cases < 12 or not (forced.plans["assist"] and seen["layers_cpu"] and counts[True]):
        problems += run_batch(rng, engine, reference, kinds, tally, seen)
        assert not problems, "\n".join(problems)
