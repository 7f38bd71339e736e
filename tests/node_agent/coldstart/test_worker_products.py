"""What workers hand back equals the float64 reference, for any shapes, ranks and slices, and nothing else leaks in."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from node_agent.adapter_memory.link import Link
from node_agent.coldstart.handoff_link import HandoffLink
from node_agent.coldstart.product import LONG_SLICE, Product
from node_agent.coldstart.shared import DTYPES, MAX_SEGMENTS, Layout
from node_agent.coldstart.slices import Segment
from node_agent.coldstart.workers import WorkerPool
from node_agent.config import LinkConfig
from node_agent.cores import spare_cores
from node_agent.types import GROUPS
from tests.node_agent.coldstart.pools import (
    CORES,
    LONG,
    MAX_TOKENS,
    TOLERANCE,
    WIDTHS,
    draw_x,
    drawn_case,
    hand_over,
    is_right,
    poison,
    started,
)
from tests.support.host_case import HostCase
from tests.support.worker_counters import counters_of

World = tuple[HostCase, WorkerPool]
WORLDS = [
    pytest.param((dtype, scattered), marks=() if scattered == (dtype is torch.bfloat16) else pytest.mark.slow)
    for dtype, scattered in itertools.product(DTYPES, (False, True))
]
"""Each dtype, and rows one after the other or anywhere; both with both in `make test-long`."""


@pytest.fixture(scope="module", params=WORLDS, ids=str)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    dtype, scattered = request.param
    case = drawn_case(dtype, seed=3, scattered=scattered)
    with started(case, workers=min(2, len(CORES))) as pool:
        pool.disarm()
        yield case, pool
    case.close()


@pytest.fixture(autouse=True)
def _armed(request: pytest.FixtureRequest) -> Iterator[None]:
    """Workers poll only while a test asks them."""
    if "world" not in request.fixturenames:
        yield
        return
    _, pool = request.getfixturevalue("world")
    pool.arm()
    yield
    pool.disarm()


@given(
    tokens=st.integers(1, MAX_TOKENS),
    slot=st.integers(0, 2),
    layer=st.integers(0, 1),
    group=st.sampled_from(list(GROUPS)),
    slice_tokens=st.integers(1, 2 * MAX_TOKENS),
    seed=st.integers(0, 1000),
)
def test_drawn(world: World, tokens: int, slot: int, layer: int, group: str, slice_tokens: int, seed: int) -> None:
    case, pool = world
    poison(pool)
    x = draw_x(tokens, WIDTHS[GROUPS[group][0]][0], pool.layout.torch_dtype, seed)
    handoff = hand_over(pool, x, slot, layer, group, slice_tokens)
    assert handoff is not None and handoff.wait(LONG)
    assert is_right(handoff, case, x, slot, layer, group)
    handoff.close()


@given(
    drawn=st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 12), st.integers(1, 20)), min_size=1, max_size=MAX_TOKENS // 12
    ),
    group=st.sampled_from(list(GROUPS)),
    layer=st.integers(0, 1),
)
def test_rows_of_several_adapters(world: World, drawn: list[tuple[int, int, int]], group: str, layer: int) -> None:
    """In one handoff, cut anywhere among the workers."""
    case, pool = world
    poison(pool)
    segments = [Segment(*one) for one in drawn]
    ends = list(itertools.accumulate(segment.tokens for segment in segments))
    x = draw_x(ends[-1], WIDTHS[GROUPS[group][0]][0], pool.layout.torch_dtype, len(segments))
    handoff = pool.open(x, segments, layer, group)
    assert handoff is not None and handoff.wait(LONG)
    for segment, end in zip(segments, ends, strict=True):
        rows = slice(end - segment.tokens, end)
        found = SimpleNamespace(outputs=[y[rows] for y in handoff.outputs])
        assert is_right(found, case, x[rows], segment.host_slot, layer, group)  # type: ignore[arg-type]
    handoff.close()


def test_slowed_workers_answer_the_same(world: World) -> None:
    case, pool = world
    assert pool.memory.repeats == 1, "as fast as they are, unless told otherwise"
    x, where = draw_x(40, 40, pool.layout.torch_dtype), (0, 0, "qkv")
    found = []
    for repeats in (1, 5):
        pool.memory.repeats = repeats
        poison(pool)
        handoff = hand_over(pool, x, *where, 16)
        assert handoff is not None and handoff.wait(LONG) and is_right(handoff, case, x, *where)
        found.append([y.clone() for y in handoff.outputs])
        handoff.close()
    pool.memory.repeats = 1
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.skipif(not spare_cores(1), reason="NOT RUN: a CPU worker needs a core beside the engine's")
def test_workers_answer_no_sooner_than_the_link_allows(world: World) -> None:
    """And with the same numbers."""
    _, pool = world
    x = draw_x(8, WIDTHS[0][0], pool.layout.torch_dtype)
    answers, seconds = [], []
    for link in (None, HandoffLink(Link(LinkConfig(2e4)), lambda size: None)):
        pool.link = link
        begun = time.monotonic()
        handoff = pool.open(x, [Segment(0, 8, 8)], 0, "qkv")
        assert handoff is not None and handoff.wait(LONG)
        seconds.append(time.monotonic() - begun)
        answers.append([y.clone() for y in handoff.outputs])
        handoff.close()
    pool.link = None
    results = sum(y.nbytes for y in answers[0])
    assert seconds[1] >= (x.nbytes + results) / 2e4
    assert all(torch.equal(a, b) for a, b in zip(*answers, strict=True))


def test_several_handoffs_at_once(world: World) -> None:
    """As many as there are slots; the next is refused, and taken when one is closed."""
    case, pool = world
    poison(pool)
    before = counters_of(pool).handoffs
    calls = [(draw_x(20 + i, 40, pool.layout.torch_dtype, i), i, 0, "qkv") for i in range(3)]
    opened = [hand_over(pool, *call, 7) for call in calls]
    assert hand_over(pool, *calls[0], 7) is None
    for handoff, (x, slot, layer, group) in reversed(list(zip(opened, calls, strict=True))):
        assert handoff is not None and handoff.wait(LONG)
        assert is_right(handoff, case, x, slot, layer, group)
        handoff.close()
    again = hand_over(pool, *calls[1], 7)
    assert again is not None and again.wait(LONG) and is_right(again, case, *calls[1])
    again.close()
    assert counters_of(pool).handoffs == before + 4


def test_an_abandoned_handoff_frees_its_slot_when_answered(world: World) -> None:
    case, pool = world
    for i in range(20):
        x = draw_x(MAX_TOKENS, 40, pool.layout.torch_dtype, i)
        handoff = hand_over(pool, x, 0, 0, "gate_up", 50)
        while handoff is None:  # all slots or workers are still busy with what was abandoned
            handoff = hand_over(pool, x, 0, 0, "gate_up", 50)
        if i < 19:
            handoff.close()
    assert handoff.wait(LONG) and is_right(handoff, case, x, 0, 0, "gate_up")
    handoff.close()


def test_outputs_are_there_between_wait_and_close_only(world: World) -> None:
    _, pool = world
    handoff = hand_over(pool, draw_x(3, 40, pool.layout.torch_dtype), 0, 0, "qkv", 3)
    assert handoff is not None
    with pytest.raises(RuntimeError, match="between a successful `wait`"):
        _ = handoff.outputs
    assert handoff.wait(LONG) and handoff.outputs
    handoff.close()
    handoff.close()
    with pytest.raises(RuntimeError, match="between a successful `wait`"):
        _ = handoff.outputs


def test_what_does_not_fit_is_refused(world: World) -> None:
    _, pool = world
    good = draw_x(3, 40, pool.layout.torch_dtype)
    for x, slot, layer, group, slices, why in (
        (good.double(), 0, 0, "qkv", 1, "x is torch.float64"),
        (good, 0, 0, "o", 1, r"\[T, 33\] is needed"),
        (good[:0], 0, 0, "qkv", 1, "x has 0 tokens"),
        (good.repeat(40, 1), 0, 0, "qkv", 1, "x has 120 tokens"),
        (good.repeat(1, 1000), 0, 0, None, 1, f"x has 3 tokens, {1000 * good.nbytes} bytes"),
        (good, 0, 0, "qkv", 0, "slices of 0"),
        (good, 3, 0, "qkv", 1, "no slot 3"),
        (good, 0, -1, "qkv", 1, "layer -1"),
    ):
        with pytest.raises(ValueError, match=why):
            hand_over(pool, x, slot, layer, group, slices)
    for segments in ([], [Segment(0, 2, 2)], [Segment(0, 3, 2), Segment(0, 0, 2)], [Segment(0, 1, 1)] * 17):
        rows = good[:1].expand(max(3, len(segments)), 40)
        with pytest.raises(ValueError, match="segment"):
            pool.open(rows, segments, 0, "qkv")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, LONG_SLICE - 1, LONG_SLICE, LONG_SLICE + 1])
def test_both_ways_of_computing(dtype: torch.dtype, tokens: int) -> None:
    """The operator's and torch's, in this process, on every group."""
    case = drawn_case(dtype, seed=tokens)
    layout = Layout(1, 1, MAX_TOKENS, WIDTHS, DTYPES.index(case.host.torch_dtype))
    product = Product(case.weights, layout)
    plain = Product(case.weights, layout, compiled=False)
    assert product.compiled and not plain.compiled
    for slot, layer, (code, group) in itertools.product(range(3), range(2), enumerate(GROUPS)):
        x = draw_x(tokens, layout.group_widths(code)[0], dtype, code)
        for way in (product, plain):
            ys = [torch.full((tokens, width), torch.nan, dtype=dtype) for width in layout.group_widths(code)[1]]
            way.compute(ys, x, slot, layer, code)
            for y, want in zip(ys, case.expected(x, slot, layer, group), strict=True):
                scale = max(1.0, float(want.abs().max()))
                assert float((y.double() - want).abs().max()) <= scale * TOLERANCE[dtype]
    with pytest.raises(IndexError, match="no slot 3"):
        product.compute([], draw_x(1, 40, dtype), 3, 0, 0)
    case.weights.table.rank[0, 0, 3] = 600
    with pytest.raises(IndexError, match=r"ranks \[600\]"):
        plain.compute([torch.zeros(1, 40, dtype=dtype)], draw_x(1, 33, dtype), 0, 0, 1)
    case.close()


@pytest.fixture
def flushed() -> Iterator[None]:
    """fp32 denormals are zeros, as in a worker."""
    torch.set_flush_denormal(True)
    yield
    torch.set_flush_denormal(False)


EXPONENTS = st.tuples(st.integers(-12, 13), st.integers(-12, 3), st.integers(-12, 0))


@pytest.mark.parametrize("compiled", [True, False])
@given(tokens=st.integers(1, 4), slot=st.integers(0, 2), group=st.integers(0, 3), exponents=EXPONENTS)
@example(tokens=2, slot=0, group=0, exponents=(13, 3, 0)).via("results beyond 65504")
@example(tokens=2, slot=0, group=0, exponents=(13, 3, -12)).via("only x A^T is beyond 65504")
@example(tokens=2, slot=0, group=0, exponents=(-12, -4, 0)).via("denormals")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_fp16_is_rounded_once(
    flushed: None, compiled: bool, tokens: int, slot: int, group: int, exponents: tuple[int, int, int]
) -> None:
    """`exponents` of x, of all weights, and of the scales."""
    case = drawn_case(torch.float16, seed=7)
    layout = Layout(1, 1, MAX_TOKENS, WIDTHS, DTYPES.index(torch.float16))
    d_in, widths = layout.group_widths(group)
    x = (draw_x(tokens, d_in, torch.float32, 1) * 2.0 ** exponents[0]).half()
    case.weights.pool.mul_(2.0 ** exponents[1])
    case.weights.table.scale.mul_(2.0 ** exponents[2])
    ys = [torch.full((tokens, width), torch.nan, dtype=torch.float16) for width in widths]
    Product(case.weights, layout, compiled=compiled).compute(ys, x, slot, 0, group)
    for y, want in zip(ys, case.expected(x, slot, 0, list(GROUPS)[group]), strict=True):
        # half of fp16's last place, and what fp32 sums are off by
        bound = want.abs().clamp(min=2.0**-14) * 2.0**-11 + float(want.abs().max()) * 2.0**-18
        beyond = want.abs() - bound >= 65520
        assert torch.equal(y[beyond].double(), want[beyond].sign() * torch.inf)
        within = want.abs() + bound < 65520
        assert bool(((y.double() - want).abs() <= bound)[within].all()) and not bool(y.isnan().any())
    case.close()


def test_layouts_that_can_not_be() -> None:
    for layout, why in (
        (Layout(0, 1, 8, WIDTHS, 0), "slots is 0"),
        (Layout(1, 65, 8, WIDTHS, 0), "workers is 65"),
        (Layout(1, 1, 1 << 21, WIDTHS, 0), "max_tokens"),
        (Layout(64, 1, 1 << 20, WIDTHS, 0), "the limit is"),
    ):
        with pytest.raises(ValueError, match=why):
            layout.check()


def test_areas_and_lines_never_overlap() -> None:
    layout = Layout(3, 1, 5, WIDTHS, 1, spares=1)
    pieces = [(layout.armed(worker), 64) for worker in range(2)]
    for slot in range(3):
        pieces += [(layout.segments(slot), 8 * MAX_SEGMENTS), (layout.failed(slot), 64)]
        pieces += [(layout.x_area(slot), layout.x_bytes), (layout.y_area(slot), layout.y_bytes)]
        pieces.append((layout.xa_area(slot), layout.xa_bytes))
        for worker in range(2):
            places = layout.command_flag(slot, worker), layout.command(slot, worker), layout.done_flag(slot, worker)
            pieces += [(at, 64) for at in (*places, layout.ready_flag(slot, worker))]
    pieces.sort()
    assert all(at + size <= after for (at, size), (after, _) in itertools.pairwise(pieces))
    assert pieces[-1][0] + pieces[-1][1] == layout.size and all(at % 64 == 0 for at, _ in pieces)
