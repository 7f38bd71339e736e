"""Engines and pools that tests share, since to start a CPU worker takes longer than most of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from node_agent.adapter_memory.integrity import check_memory
from node_agent.adapter_memory.residency import evict
from node_agent.coldstart.learning import Correction, engine_correction
from node_agent.coldstart.workers import WorkerPool
from node_agent.leases import InUse
from tests.node_agent.coldstart.held_link import HeldLink
from tests.node_agent.coldstart.pools import LONG, eventually
from tests.support.local_engine import LocalEngine
from tests.support.worker_counters import counters_of


@contextmanager
def as_started(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalEngine]:
    """Within it the engine, which has one worker or none, is as if it had just started: nothing is loaded, and nothing
    is known of earlier calls. What a test replaces in it, it replaces by `monkeypatch`; but for its link, which may be
    a HeldLink."""
    starts, loader, hosts = engine.engine.cold_start, engine.engine.store.loader, engine.engine.store.hosts
    profile, pool, limits = starts.profile, starts.workers, engine.engine.limits
    link, failure_memory = loader.device_link, hosts.failure_memory
    if pool is not None:
        assert pool.wait_ready(LONG) == 1
        eventually(lambda: not counters_of(pool).in_quarantine)
    starts.row_cpu, starts.device = Correction(), engine_correction()
    starts.unmeasured.clear()
    starts.unmeasurable.clear()
    yield engine
    held, loader.device_link, engine.engine.limits = loader.device_link, link, limits
    if isinstance(held, HeldLink):
        held.open()
    engine.end()
    empty(engine)
    hosts.failure_memory = failure_memory
    monkeypatch.undo()
    starts.use(profile, pool)


def pool_of(engine: LocalEngine) -> WorkerPool:
    assert engine.engine.assist is not None
    return engine.engine.assist.workers


def empty(engine: LocalEngine) -> None:
    """Takes every adapter from both tiers, once no worker reads it, and has the prefix cache forget what it knows."""
    store, blocks = engine.engine.store, engine.engine.blocks

    def is_empty() -> bool:
        engine.step()
        for digest in {*store.device, *(host.digest for host in store.hosts.all())}:
            with suppress(InUse):
                evict(store, digest)
        return not store.device and not store.hosts.used

    eventually(is_empty)
    assert check_memory(store) == []
    taken = blocks.allocate(blocks.free)
    assert taken is not None
    blocks.release(taken)
