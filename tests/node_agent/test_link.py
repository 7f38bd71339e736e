"""The simulated link against an event-by-event computation of processor sharing, on a clock that the test turns."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node_agent.adapter_memory.link import Flow, Link, LinkClosed, Transfer
from node_agent.config import LinkConfig


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def arrival(link: Link, transfer: Transfer) -> float:
    """When the transfer has arrived, or will if no other flow joins or leaves; in seconds of the clock."""
    with link._changed:
        link._advance(link.clock())
        return link._arrival(transfer)


@dataclass
class Job:
    """What the reference knows of one flow: its transfers (begin, bytes) in order, and when it is closed."""

    transfers: list[tuple[float, int]]
    closed: float | None = None


def processor_sharing(jobs: list[Job], bandwidth: float) -> list[list[float | None]]:
    """When each transfer is across, by walking from event to event with the bytes that are left; None if never."""
    left = [[float(size) for _, size in job.transfers] for job in jobs]
    ends: list[list[float | None]] = [[None] * len(job.transfers) for job in jobs]
    now = 0.0
    while True:
        heads: dict[int, int] = {}
        for j, job in enumerate(jobs):
            waiting = [t for t, (begin, _) in enumerate(job.transfers) if begin <= now and ends[j][t] is None]
            if waiting and (job.closed is None or now < job.closed):
                heads[j] = waiting[0]
        later = [begin for job in jobs for begin, _ in job.transfers if begin > now]
        later += [job.closed for job in jobs if job.closed is not None and job.closed > now]
        share = bandwidth / max(1, len(heads))
        done = [now + left[j][t] / share for j, t in heads.items()]
        if not later and not done:
            return ends
        then = min([*later, *done])
        for j, t in heads.items():
            left[j][t] -= (then - now) * share
            if left[j][t] <= 1e-9:
                ends[j][t] = then
        now = then


JOBS = st.lists(
    st.builds(
        Job,
        st.lists(st.tuples(st.integers(0, 40).map(float), st.integers(1, 50)), min_size=1, max_size=3).map(sorted),
        st.one_of(st.none(), st.integers(1, 60).map(lambda n: n + 0.5)),
    ),
    min_size=1,
    max_size=5,
)


@given(jobs=JOBS, bandwidth=st.sampled_from([1.0, 4.0]), latency=st.sampled_from([0.0, 0.25]), looks=st.booleans())
def test_flows_share_equally(jobs: list[Job], bandwidth: float, latency: float, looks: bool) -> None:
    """However often the link is looked at meanwhile, each transfer arrives when processor sharing says."""
    clock = Clock()
    link = Link(LinkConfig(bandwidth, latency), clock=clock)
    flows = [Flow() for _ in jobs]
    begun = [[] for _ in jobs]  # type: ignore[var-annotated]
    events = [(begin, 0, j, size) for j, job in enumerate(jobs) for begin, size in job.transfers]
    events += [(job.closed, 1, j, 0) for j, job in enumerate(jobs) if job.closed is not None]
    for now, closes, j, size in sorted(events):
        if looks:
            clock.now = (clock.now + now) / 2
            for transfer in (t for flow in begun for t in flow if not t.flow.closed):
                arrival(link, transfer)
        clock.now = now
        if closes:
            link.leave(flows[j])
        elif not flows[j].closed:
            begun[j].append(link.begin(flows[j], size))
    clock.now = 1e6
    for j, expected in enumerate(processor_sharing(jobs, bandwidth)):
        for transfer, end in zip(begun[j], expected, strict=False):
            if end is None or (flows[j].closed and transfer.crossed is None):
                assert end is None and transfer.crossed is None
            else:
                assert arrival(link, transfer) == pytest.approx(end + latency) if not flows[j].closed else True
                assert transfer.crossed == pytest.approx(end)


def test_the_forecast_is_what_happens_if_nobody_joins() -> None:
    clock = Clock()
    link = Link(LinkConfig(10.0, 1.0), clock=clock)
    long, short = link.begin(Flow(), 100), link.begin(Flow(), 20)
    assert (arrival(link, short), arrival(link, long)) == (5.0, 13.0)  # 20 at half the rate; 80 more at the whole
    clock.now = 2.0
    link.begin(Flow(), 1000)
    assert arrival(link, short) == pytest.approx(1.0 + 2.0 + 10 / (10 / 3))


def test_one_load_has_one_share_however_many_transfers_it_begins() -> None:
    link = Link(LinkConfig(10.0), clock=Clock())
    many, one = Flow(), Flow()
    first, second, other = link.begin(many, 10), link.begin(many, 10), link.begin(one, 20)
    assert [arrival(link, t) for t in (first, second, other)] == pytest.approx([2.0, 4.0, 4.0])


@pytest.mark.parametrize("whole_link", [False, True])
def test_a_close_ends_the_wait(whole_link: bool) -> None:
    link = Link(LinkConfig(1e-6))  # a byte takes eleven days
    flow = Flow()
    transfer = link.begin(flow, 1)
    answers: list[Exception] = []

    def wait() -> None:
        try:
            link.wait(transfer)
        except LinkClosed as error:
            answers.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    if whole_link:
        link.close()
    else:
        link.leave(flow)
    waiter.join(30)
    assert len(answers) == 1
    if whole_link:
        with pytest.raises(LinkClosed):
            link.carry(1)


def test_it_waits_at_least_as_long_as_it_says() -> None:
    """By the real clock: concurrent carries take as long as their bytes together, and come back in order of size."""
    link = Link(LinkConfig(1e6, 0.002))
    ended: list[tuple[int, float]] = []
    begun = link.clock()
    sizes = [5_000, 10_000, 20_000]

    def carry(size: int) -> None:
        link.carry(size)
        ended.append((size, link.clock()))

    threads = [threading.Thread(target=carry, args=(size,)) for size in sizes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(size for size, _ in ended) == sizes
    assert max(at for _, at in ended) - begun >= sum(sizes) / 1e6 + 0.002


def test_without_a_config_nothing_is_delayed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        link = Link(None)
        flow = Flow()
        link.wait(link.begin(flow, 1 << 60))
        link.carry(1 << 60)
        assert not caplog.records
        Link(LinkConfig(5.0), "store")
    assert [record.message for record in caplog.records] == ["a simulated link delays transfers"]
