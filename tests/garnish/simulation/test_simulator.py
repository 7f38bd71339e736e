"""Whole runs: every request ends once, nothing is left over, equal input gives equal results."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import PROFILE, job

from cluster.node_table import NodeTable
from garnish.simulation.job import TraceRequest
from garnish.simulation.node import SimulatedNode
from garnish.simulation.outcome import summarise
from garnish.simulation.profile import NodeProfile
from garnish.simulation.simulator import Simulator
from garnish.simulation.slo import Slo, SloError, base_tpt, parse_slo
from garnish.simulation.study import policy_maker, policy_names, simulate, smallest_pool
from gateway.scheduling.dlora import Dlora
from gateway.scheduling.request import RoutingRequest
from tests.support.draws import draws

REQUESTS = st.lists(
    st.builds(
        lambda gap, function, prompt, output, tenant: (gap, function, prompt, output, tenant),
        st.integers(0, 60),
        st.integers(0, 12),
        st.integers(1, 300),
        st.integers(1, 60),
        st.sampled_from(["x", "y"]),
    ),
    min_size=1,
    max_size=60,
)


def trace(drawn: list) -> list[TraceRequest]:
    at, found = 0, []
    for gap, function, prompt, output, tenant in drawn:
        at += gap
        rank = (8, 16, 32, 64)[function % 4]
        found.append(TraceRequest(at * 1e-3, f"f{function}" if function else "", rank, prompt, output, tenant))
    return found


@pytest.mark.parametrize("policy", policy_names())
@given(drawn=REQUESTS, nodes=st.integers(1, 4))
def test_every_request_ends_once(policy: str, drawn: list, nodes: int) -> None:
    profile = msgspec.structs.replace(PROFILE, queue_limit=6)
    ended: Counter[int] = Counter()
    requests = trace(drawn)
    simulator, summary = simulate(requests, profile, nodes, policy, Slo(tpt=0.1))
    for found in simulator.jobs:
        ended[found.number] += 1
        assert found.outcome in ("done", "rejected")
        if found.outcome == "done":
            assert found.at <= found.admitted <= found.first_token <= found.end
            assert found.generated == found.output
            assert found.entry is None
    assert summary.done + summary.rejected == summary.requests == len(requests) == len(ended)
    assert summary.attainment <= summary.attainable + 1e-9
    assert summary.output_tokens == sum(f.output for f in simulator.jobs if f.outcome == "done")
    for node in simulator.nodes:
        assert_empty(node, profile)


def assert_empty(node: SimulatedNode, profile: NodeProfile) -> None:
    assert not (node.queue or node.running or node.prefilling or node.stalled or node.leaving)
    assert (node.kv_free, node.contexts(1e9)) == (profile.kv_tokens, 0)
    for mix in (node.queued_mix, node.running_mix, node.decoding):
        assert (mix.rows, mix.request_ranks, mix.adapter_ranks, mix.max_rank) == (0, 0, 0, 0)
    memory = node.loads.memory
    assert memory.free == profile.adapter_memory
    assert not any(memory.leases(digest) for digest in memory.device)
    assert sum(entry.bytes for entry in memory.device.values()) <= profile.adapter_memory
    assert sum(memory.host.values()) <= profile.host_memory


@pytest.mark.parametrize("policy", policy_names())
@settings(max_examples=draws(10))
@given(drawn=REQUESTS)
def test_equal_input_gives_equal_results(policy: str, drawn: list) -> None:
    runs = [simulate(trace(drawn), PROFILE, 3, policy, Slo(tpt=0.1), seed=7)[0] for _ in range(2)]
    first, second = ([(j.node, j.first_token, j.end) for j in found.jobs] for found in runs)
    assert first == second


class Pile(Dlora):
    """Every request goes to the first node."""

    def choose(self, nodes: NodeTable, candidates: np.ndarray, request: RoutingRequest) -> int | None:
        return int(candidates[0])


@pytest.mark.parametrize("count", [3, 8, 24], ids=["too few", "running ones", "waiting ones"])
def test_dlora_moves_requests_and_computes_their_tokens_again(count: int) -> None:
    profile = msgspec.structs.replace(PROFILE, queue_limit=100, max_rows=8, kv_tokens=8192)

    def piled(period: float) -> Simulator:
        policy = Pile()
        policy.period = period
        jobs = [job(i, i * 0.001, output=400, digest="a") for i in range(count)]
        simulator = Simulator(profile, 2, lambda _: policy, jobs)
        simulator.run()
        return simulator

    still, moving = piled(1e6), piled(1.0)
    gone = [found for found in moving.jobs if found.moves]
    assert summarise(moving, Slo()).moves == len(gone)
    assert all(found.moves == 1 and found.generated == found.output and found.node == 1 for found in gone)
    if count == 3:
        assert not gone
        return
    assert gone
    assert max(found.end for found in moving.jobs) < max(found.end for found in still.jobs)
    ran = [found for found in gone if found.first_token < 1.0]
    assert bool(ran) == (count == 8)


def test_the_oracle_knows_what_is_nearly_done() -> None:
    """Both nodes have one request; that of the second one will end soon."""
    outputs = [(0.0, 400), (0.001, 60), (0.6, 400)]
    jobs = [job(i, at, output=output, digest=None) for i, (at, output) in enumerate(outputs)]
    Simulator(PROFILE, 2, policy_maker("oracle", 0), jobs).run()
    assert jobs[1].end > 0.6
    assert jobs[2].node == jobs[1].node != jobs[0].node


def test_records_come_as_in_production() -> None:
    """At least every 0.2 s, and no two of a node within 20 ms."""
    simulator = Simulator(PROFILE, 1, policy_maker("most_idle", 0), [job(i, i * 0.005) for i in range(50)])
    told: list[float] = []
    tell = simulator.table.receive
    simulator.table.receive = lambda node, now: (told.append(now), tell(node, now))[1]  # type: ignore[method-assign]
    simulator.run()
    gaps = [after - before for before, after in pairwise(told)]
    assert min(gaps) >= 0.02 - 1e-9
    assert max(gaps) <= 0.2 + 1e-9


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tpt=60ms", Slo(tpt=0.06)),
        ("ttft=0.5s, tpot=60ms", Slo(ttft=0.5, tpot=0.06)),
        ("tpt=1.5x", Slo(tpt=1.5 * base_tpt(PROFILE))),
    ],
)
def test_slo(text: str, expected: Slo) -> None:
    assert parse_slo(text, PROFILE) == expected


@pytest.mark.parametrize("text", ["", "tpt", "tpt=0ms", "tpt=5", "ttft=2x", "tpt=1x,tpt=2x", "tpt=nan ms", "e2e=5ms"])
def test_no_slo(text: str) -> None:
    with pytest.raises(SloError, match="SLO"):
        parse_slo(text, PROFILE)


@given(st.integers(1, 60), st.integers(0, 60), st.integers(0, 70))
def test_smallest_pool(low: int, more: int, enough: int) -> None:
    high, asked = low + more, list[int]()

    def attainment(nodes: int) -> float:
        asked.append(nodes)
        return 1.0 if nodes >= enough else 0.5

    expected = None if enough > high else max(low, enough)
    assert smallest_pool(attainment, low, high, 0.99) == expected
    assert len(asked) <= 8
