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
from cluster.performance_model import Transfer
from garnish.simulation.batch import DecodeRun
from garnish.simulation.job import Job
from garnish.simulation.loads import SharedLink
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
SPEED = Transfer(latency=0.01, bandwidth=1000.0)


def jobs_of(drawn: list[tuple[int, int, int, int, str | None]]) -> list[Job]:
    """Gaps in ms; an adapter has one rank."""
    times = accumulate(gap for gap, *_ in drawn)
    ranks: dict[str | None, int] = {}
    return [
        job(i, at * 1e-3, prompt, output, ranks.setdefault(digest, rank), digest)
        for i, (at, (_, prompt, output, rank, digest)) in enumerate(zip(times, drawn, strict=True))
    ]


@pytest.mark.parametrize("term", ["max_rank", "request_ranks", "adapter_ranks"])
@given(drawn=JOBS, one_pass=st.booleans(), padded=st.sampled_from([0, 24]))
def test_it_does_what_one_does_that_goes_step_by_step(term: str, drawn: list, one_pass: bool, padded: int) -> None:
    profile = msgspec.structs.replace(
        CACHED,
        performance=model(term, padded_rank=padded),
        one_pass=one_pass,
        kv_tokens=320,
        queue_limit=100,
        chunk_tokens=50,
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
    assert (warm.arrival_tier, cold.arrival_tier) == (DEVICE, HOST)
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
    assert fetched.arrival_tier == ABSENT
    fetch = PROFILE.performance.from_store.seconds(size)
    assert fetched.first_token - warm.first_token == pytest.approx(0.3 * fetch)


def test_least_recently_used_adapters_leave() -> None:
    """Room for two of three; the third call of `a` finds it, that of `b` does not."""
    profile = msgspec.structs.replace(PROFILE, adapter_memory=16_000, host_memory=None)
    names = ["a", "b", "a", "c", "a", "b"]
    jobs = [job(i, i * 1.0, digest=name) for i, name in enumerate(names)]
    run(jobs, profile)
    assert [found.arrival_tier for found in jobs] == [HOST, HOST, DEVICE, HOST, DEVICE, HOST]


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


@given(
    st.floats(0, 1e4),
    st.floats(1e-4, 1.0),
    st.floats(0, 1.0),
    st.integers(1, 300),
    st.floats(0, 1.2),
)
def test_it_is_the_sum_of_its_steps(begin: float, first: float, share: float, steps: int, where: float) -> None:
    growth = first * share
    ends = [begin]
    for step in range(steps):
        ends.append(ends[-1] + first + growth * step)
    run = DecodeRun(begin, first, growth, steps)
    assert run.end == pytest.approx(ends[-1], abs=1e-6)
    now = begin + (ends[-1] - begin) * where
    if min(abs(now - end) for end in ends) < 1e-6:
        return  # on a border either side is right
    assert run.done_by(now) == sum(end <= now for end in ends[1:])
    run.cut(now)
    assert run.steps == min(steps, sum(end <= now for end in ends[1:]) + 1)


def test_borders() -> None:
    run = DecodeRun(1.0, 0.5, 0.0, 4)
    assert [run.done_by(at) for at in (0.0, 1.0, 1.49, 1.5, 3.0, 9.0)] == [0, 0, 0, 1, 4, 4]
    run.cut(1.0)
    assert (run.steps, run.end) == (1, 1.5), "a step that has begun is ended"
    run = DecodeRun(1.0, 0.5, 0.0, 4)
    run.cut(2.0)
    assert run.steps == 2, "nothing begins at the very time of the cut"


def exact(starts: list[tuple[float, int]]) -> list[float]:
    """Ends of transfers that share equally: from event to event, every left-over is reckoned anew."""
    left: dict[int, float] = {}
    ends, now, coming = [0.0] * len(starts), 0.0, sorted(range(len(starts)), key=lambda i: starts[i][0])
    while left or coming:
        until = starts[coming[0]][0] if coming else float("inf")
        done = now + min(left.values()) * len(left) / SPEED.bandwidth if left else float("inf")
        then = min(until, done)
        for i in left:
            left[i] -= (then - now) * SPEED.bandwidth / len(left)
        now = then
        if until <= done:
            i = coming.pop(0)
            left[i] = starts[i][1] + SPEED.latency * SPEED.bandwidth
        else:
            for i in [i for i, rest in left.items() if rest <= 1e-6]:
                ends[i] = now
                del left[i]
    return ends


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(1, 2000)), min_size=1, max_size=12))
def test_transfers_share_equally(starts: list[tuple[float, int]]) -> None:
    starts.sort()
    link, sizes, ends = SharedLink(SPEED), {str(i): size for i, (_, size) in enumerate(starts)}, {}
    coming = list(enumerate(starts))
    while coming or link.bytes:
        if coming and coming[0][1][0] <= link.next:
            i, (at, size) = coming.pop(0)
            link.start(str(i), size, at, 1.0)
            continue
        now = link.next
        for what, name in link.reached(now, sizes):
            if what == "end":
                ends[int(name)] = now
    assert [ends[i] for i in range(len(starts))] == pytest.approx(exact(starts), abs=1e-5)


def test_marks_come_in_order() -> None:
    link = SharedLink(Transfer(0.0, 100.0))
    link.start("a", 100, 0.0, 0.3)
    assert link.next == pytest.approx(0.3)
    assert link.reached(0.3, {"a": 100}) == [("ready", "a")]
    assert (link.bytes, link.next) == (100, pytest.approx(1.0))
    assert link.reached(1.0, {"a": 100}) == [("end", "a")]
    assert (link.bytes, link.next) == (0, float("inf"))
