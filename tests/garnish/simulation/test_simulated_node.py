"""One node: against an independent one that goes step by step, and against queueing theory."""

from __future__ import annotations

from itertools import accumulate

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated import CACHED, PROFILE, job, model, run
from step_by_step import step_by_step

from cluster.node_table import ABSENT, DEVICE, HOST
from garnish.simulation.job import Job
from garnish.simulation.node import SimulatedNode
from garnish.simulation.profile import NodeProfile
from garnish.simulation.simulator import Simulator
from garnish.simulation.slo import Slo
from gateway.scheduling.baselines import MostIdle

JOBS = st.lists(
    st.tuples(
        st.integers(0, 400),
        st.integers(1, 150),
        st.integers(1, 40),
        st.sampled_from([8, 16, 64]),
        st.sampled_from([None, "a", "b"]),
    ),
    min_size=1,
    max_size=14,
)


def jobs_of(drawn: list[tuple[int, int, int, int, str | None]]) -> list[Job]:
    """Gaps in ms; an adapter has one rank."""
    times = accumulate(gap for gap, *_ in drawn)
    ranks: dict[str | None, int] = {}
    return [
        job(i, at * 1e-3, prompt, output, ranks.setdefault(digest, rank), digest)
        for i, (at, (_, prompt, output, rank, digest)) in enumerate(zip(times, drawn, strict=True))
    ]


@pytest.mark.parametrize("term", ["max_rank", "request_ranks", "adapter_ranks"])
@given(drawn=JOBS, one_pass=st.booleans())
def test_it_does_what_one_does_that_goes_step_by_step(term: str, drawn: list, one_pass: bool) -> None:
    profile = msgspec.structs.replace(
        CACHED, performance=model(term), one_pass=one_pass, kv_tokens=320, queue_limit=100, chunk_tokens=50
    )
    jobs = jobs_of(drawn)
    run(jobs, profile)
    expected = step_by_step(jobs, profile)
    for found in jobs:
        times = expected[found.number]
        assert (found.first_token, found.end) == (pytest.approx(times[0], abs=1e-6), pytest.approx(times[-1], abs=1e-6))


@given(drawn=JOBS, at=st.floats(0.0, 1.0))
def test_it_tells_contexts_and_tokens_in_the_midst(drawn: list, at: float) -> None:
    """What a record says between two events is what step by step is true then."""
    jobs = jobs_of(drawn)
    profile = msgspec.structs.replace(CACHED, queue_limit=100)
    expected = step_by_step(jobs_of(drawn), profile)
    now = at * max(times[-1] for times in expected.values())
    if any(abs(now - time) < 1e-6 for times in expected.values() for time in times):
        return
    node = SimulatedNode(0, profile, lambda _: None)
    for coming in jobs:
        while node.next_time < min(coming.at, now):
            node.wake(node.next_time)
        if coming.at > now:
            break
        node.submit(coming, coming.at)
    while node.next_time < now:
        node.wake(node.next_time)
    assert node.contexts(now) == sum(node.context(found, now) for found in node.running)
    for found in node.running:
        assert node.tokens(found, now) == sum(time <= now for time in expected[found.number])


def test_waiting_is_what_queueing_theory_says() -> None:
    """One row, equal requests of one token, Poisson arrivals at half load: M/D/1."""
    profile = msgspec.structs.replace(CACHED, max_rows=1, queue_limit=10_000)
    service = profile.performance.prefill.seconds(20, 400, 0)
    rng = np.random.default_rng(1)
    at = np.cumsum(rng.exponential(2 * service, 20_000)).tolist()
    jobs = [job(i, time, output=1, digest=None) for i, time in enumerate(at)]
    run(jobs, profile)
    ends, free = [], 0.0
    for time in at:
        free = max(free, time) + service
        ends.append(free)
    assert [found.end for found in jobs] == pytest.approx(ends, abs=1e-6)
    waited = float(np.mean([found.end - found.at - service for found in jobs]))
    assert waited == pytest.approx(service * 0.5 / (2 * (1 - 0.5)), rel=0.05)


def test_passes_take_as_much_longer_as_they_are_told_to() -> None:
    """Whatever the profile says, which is what the node tells of itself."""

    def taking(factor: float) -> Simulator:
        jobs = [job(0, 0.0, output=9), job(1, 0.0, output=5)]
        return Simulator(CACHED, 1, lambda _: MostIdle(), jobs, lambda _: lambda: factor)

    once, twice = taking(1.0), taking(2.0)
    for simulator in (once, twice):
        simulator.run()
    for plain, slow in zip(once.jobs, twice.jobs, strict=True):
        assert (slow.first_token, slow.end) == (pytest.approx(2 * plain.first_token), pytest.approx(2 * plain.end))
    assert (once.table.decode_base == twice.table.decode_base).all()


def lone(profile: NodeProfile, output: int = 5) -> Job:
    (found,) = run([job(0, 0.0, output=output)], profile).jobs
    return found


@given(st.integers(1, 60), st.integers(1, 40), st.floats(0.001, 0.1))
def test_what_an_empty_node_could_keep(prompt: int, output: int, bound: float) -> None:
    profile = msgspec.structs.replace(CACHED, overhead=0.002)
    (found,) = run([job(0, 0.0, prompt, output)], profile).jobs
    slo = Slo(tpt=bound)
    if abs(found.tpt + profile.overhead / output - bound) > 1e-9:
        assert slo.attainable(found, profile) == slo.holds(found, profile.overhead)


def test_a_cold_request_waits_for_its_exposed_share() -> None:
    warm, size = lone(CACHED), 8000
    there = msgspec.structs.replace(PROFILE, host_memory=None)
    copy = there.performance.to_device.seconds(size)
    cold = lone(there)
    assert (warm.found, cold.found) == (DEVICE, HOST)
    assert cold.first_token - warm.first_token == pytest.approx(0.3 * copy)
    none = lone(msgspec.structs.replace(there, performance=model(exposed_share=0.0)))
    assert none.first_token == pytest.approx(warm.first_token)
    # its second token needs the whole adapter
    slow = msgspec.structs.replace(model(exposed_share=0.0), to_device=msgspec.structs.replace(
        model().to_device, bandwidth=8000.0))  # fmt: skip
    late = lone(msgspec.structs.replace(there, performance=slow), output=2)
    step = warm.tpot
    assert late.end == pytest.approx(slow.to_device.seconds(size) + step, abs=1e-4)
    fetched = lone(PROFILE)
    assert fetched.found == ABSENT
    fetch = PROFILE.performance.from_store.seconds(size)
    assert fetched.first_token - warm.first_token == pytest.approx(0.3 * fetch)


def test_least_recently_used_adapters_leave() -> None:
    """Room for two of three; the third call of `a` finds it, that of `b` does not."""
    profile = msgspec.structs.replace(PROFILE, adapter_memory=16_000, host_memory=None)
    names = ["a", "b", "a", "c", "a", "b"]
    jobs = [job(i, i * 1.0, digest=name) for i, name in enumerate(names)]
    run(jobs, profile)
    assert [found.found for found in jobs] == [HOST, HOST, DEVICE, HOST, DEVICE, HOST]


def test_a_flood_of_one_tenant_does_not_keep_the_other_waiting() -> None:
    """One row: of twenty requests that wait, the other tenant's is next; then both come by turns."""
    flood = [of_tenant(i, 0.001 * i, "x") for i in range(20)]
    others = [of_tenant(20 + i, 0.05 + 0.001 * i, "y") for i in range(3)]
    run([*flood, *others], msgspec.structs.replace(CACHED, max_rows=1, queue_limit=100))
    order = [found.tenant for found in sorted([*flood, *others], key=lambda found: found.admitted)]
    assert order[1:7].count("y") == 3
    assert order[7:] == ["x"] * 16


def of_tenant(number: int, at: float, tenant: str) -> Job:
    found = job(number, at, digest=None)
    found.tenant = tenant
    return found


def test_loading_requests_leave_rows_to_others() -> None:
    """A quarter of four rows: of two that load one waits, and warm ones pass."""
    slow = msgspec.structs.replace(model(), to_device=msgspec.structs.replace(model().to_device, bandwidth=8000.0))
    profile = msgspec.structs.replace(PROFILE, performance=slow, host_memory=None)
    jobs = [job(0, 0.0, digest="a"), job(1, 0.01, digest="b"), job(2, 0.02, digest=None)]
    run(jobs, profile)
    assert jobs[2].end < jobs[0].first_token < jobs[1].admitted


def test_what_can_never_run_is_turned_away() -> None:
    large = job(0, 0.0, digest="large", rank=200)
    long = job(1, 0.0, prompt=3000)
    run([large, long])
    assert {large.outcome, long.outcome} == {"rejected"}
