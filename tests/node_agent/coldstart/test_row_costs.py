"""Steps that rows join, against sums in plain Python; and what is learnt of rows that shared a worker."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adapters.base_model import BaseModel, load_base_model
from node_agent.adapter_memory.layout import AdapterLayout, lay_out_uniform
from node_agent.coldstart.cold_starts import MODES, ColdStarts
from node_agent.coldstart.profile import CpuLora, LinkCost, Profile, ProfileKey
from node_agent.coldstart.row_costs import MAX_JOINED, JoinedStep, RowCosts, RowPart
from node_agent.coldstart.slices import MIN_SHARE
from node_agent.leases import Lease
from node_agent.types import GROUPS

LAYER_S = 1e-3
"""Of every pass of up to 16 tokens."""


@pytest.fixture(scope="module")
def base(stories_dir: Path) -> BaseModel:
    return load_base_model(stories_dir)


def profile(fixed: float, per_element: float = 0.0, handoff: LinkCost | None = None) -> Profile:
    cpu = CpuLora(fixed, per_element, 0.0)
    return Profile(ProfileKey("", "float32", "cpu", 1, 1), ((16, LAYER_S),), cpu, LinkCost(0.0, 1e9), handoff)


def layout(base: BaseModel, rank: int, projections: tuple[int, ...]) -> AdapterLayout:
    return lay_out_uniform(base, rank, projections, 4, 1024)


def shares(base: BaseModel) -> list[float]:
    """Each group's part of a layer."""
    sizes = [sum(base.widths[p][0] * base.widths[p][1] for p in members) for members in GROUPS.values()]
    return [size / sum(sizes) for size in sizes]


def test_work_is_that_of_each_adapted_group(base: BaseModel) -> None:
    costs = RowCosts(profile(1e-6, 1e-9, LinkCost(1e-5, 1e6)), base)
    found = costs.work(layout(base, 8, (0, 2, 6)), 3)
    q, v, down = (8 * sum(base.widths[p]) for p in (0, 2, 6))
    expected = [1e-6 + 1e-9 * (q + v), 0.0, 0.0, 1e-6 + 1e-9 * down]
    np.testing.assert_allclose(found, [expected] * base.num_layers)
    handed, answered = base.widths[6]
    crossing = costs.crossings(layout(base, 8, (6,)), 12)
    assert crossing[0].tolist() == pytest.approx([0.0, 0.0, 0.0, 1e-5 + 12 * handed / 1e6 + 12 * answered / 1e9])


def test_a_chunk_of_few_tokens_costs_each_worker_its_share_of_the_weights(base: BaseModel) -> None:
    fixed, per_element = 1e-6, 1e-9
    costs, tokens = RowCosts(profile(fixed, per_element), base), 3
    whole = layout(base, 512, (0, 1, 2))
    elements = 512 * sum(sum(base.widths[p]) for p in (0, 1, 2))
    shares = elements // MIN_SHARE
    assert shares > 1
    for workers in (1, 2, 100):
        found = costs.slices(whole, tokens, workers)[0, 0]
        assert found == pytest.approx(fixed + per_element * elements / min(workers, shares), rel=1e-4)


PARTS = st.lists(st.tuples(st.integers(1, 3), st.floats(0, 3e-4), st.integers(0, 31)), min_size=1, max_size=6)


@given(PARTS, st.integers(0, 4))
def test_a_step_takes_what_all_that_joined_make_it_take(
    base: BaseModel, drawn: list[tuple[int, float, int]], others: int
) -> None:
    """One worker computes part after part beside the product; the last one asked pays for what it adds."""
    step = JoinedStep(RowCosts(profile(0.0), base), 1, others)
    beside = [share * LAYER_S for share in shares(base)]
    layers, joined = base.num_layers, list[np.ndarray]()

    def longer(parts: list[np.ndarray]) -> float:
        return sum(
            max(0.0, sum(part[layer][group] for part in parts) - beside[group])
            for layer in range(layers)
            for group in range(len(GROUPS))
        )

    for rows, seconds, seed in drawn:
        if step.full:
            assert len(joined) == MAX_JOINED
            break
        work = np.random.default_rng(seed).uniform(0, seconds, (layers, len(GROUPS)))
        part = RowPart(rows, work, 0.0, 0.0, load_left=1.0)
        found = step.costs(part)
        assert found.longer == pytest.approx(longer([*joined, work]) - longer(joined), abs=1e-12)
        assert found.before == pytest.approx(longer(joined), abs=1e-12)
        assert found.other_requests == others
        if step.join(part):
            joined.append(work)
            others += rows


def test_several_workers_share_several_parts(base: BaseModel) -> None:
    work = np.full((base.num_layers, len(GROUPS)), 1e-2)
    costs = RowCosts(profile(0.0), base)
    steps = [JoinedStep(costs, workers, 0) for workers in (1, 2)]
    for step in steps:
        assert step.join(RowPart(1, work, 0.0, 0.0, load_left=9.0))
    alone, shared = (step.costs(RowPart(1, work, 0.0, 0.0, load_left=9.0)).longer for step in steps)
    assert alone == pytest.approx(4 * base.num_layers * 1e-2)
    assert shared == pytest.approx(0.0)


@pytest.mark.parametrize("slower", [0.5, 3.0, 8.0])
def test_rows_that_wait_for_each_other_do_not_make_their_worker_slow(base: BaseModel, slower: float) -> None:
    """It takes `slower` times its profile for each of two adapters, and the second one's rows wait for both."""
    wide = layout(base, 8, tuple(range(7)))
    store = SimpleNamespace(layout=lambda _: wide, pool=SimpleNamespace(data=torch.zeros(1)))
    starts = ColdStarts(store, base, MODES["auto"], profile(2e-3), SimpleNamespace(usable=1))  # type: ignore[arg-type]
    layers = base.num_layers
    work = slower * 2e-3 * 4 * layers
    first, second = work - LAYER_S * layers, work
    loras = [SimpleNamespace(layers_on_cpu=layers, waited=waited) for waited in (first, second)]
    for _ in range(40):
        starts.observe_joined([(Lease("", i, (8,)), 1, lora) for i, lora in enumerate(loras)])  # type: ignore[misc]
    assert starts.row_cpu.value == pytest.approx(slower, rel=0.05)


def test_a_worker_that_ends_while_its_step_is_judged_teaches_nothing_wrong(base: BaseModel) -> None:
    """The keeper's thread may note that at any time: the last one is counted, and is gone at the next look."""

    class Ending:
        def __init__(self) -> None:
            self.left = [1, 0]

        @property
        def usable(self) -> int:
            return self.left.pop(0) if self.left else 0

    wide = layout(base, 8, tuple(range(7)))
    store = SimpleNamespace(layout=lambda _: wide, pool=SimpleNamespace(data=torch.zeros(1)))
    starts = ColdStarts(store, base, MODES["auto"], profile(2e-3), Ending())  # type: ignore[arg-type]
    waited = 2e-3 * 4 * base.num_layers - LAYER_S * base.num_layers
    lora = SimpleNamespace(layers_on_cpu=base.num_layers, waited=waited)
    starts.observe_joined([(Lease("", 0, (8,)), 1, lora)])  # type: ignore[list-item]
    assert starts.row_cpu.value == pytest.approx(1.0)
