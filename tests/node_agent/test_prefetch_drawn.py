"""Predicted prefetches among drawn calls, wants and faults: no byte is wrong, and nothing is left behind."""

from __future__ import annotations

import random
import time

import pytest

from adapters.store import Arrived
from cluster.messages import Adapter
from node_agent.adapter_memory import fetch, ranges
from node_agent.adapter_memory.integrity import check_memory
from node_agent.adapter_memory.store import AdapterStore
from node_agent.config import LinkConfig
from node_agent.engine.prefetch_record import MAX_AT_ONCE
from node_agent.engine.prefetcher import Prefetcher
from node_agent.leases import LayerState, Lease
from tests.node_agent.adapter_world import LAYERS, World, assert_layer
from tests.node_agent.prefetch_world import MakePrefetcher, assert_nothing_held, call, poll_until, want, wanted
from tests.node_agent.test_loader_threads import Flaky


class Caller:
    """Draws what requests, the gateway, operators and time may do to the prefetches of one store."""

    def __init__(self, world: World, store: AdapterStore, prefetcher: Prefetcher, seed: int) -> None:
        self.world, self.store, self.prefetcher, self.rng = world, store, prefetcher, random.Random(seed)
        self.waiting: list[Adapter] = []
        self.held: list[Lease] = []

    def step(self) -> None:
        rng, store, prefetcher = self.rng, self.store, self.prefetcher
        adapter = rng.choice(self.world.adapters)
        match rng.choice(
            ["call", "leave", "leave", "lease", "lease", "release", "want", "want", "end", "wait", "wait"]
        ):
            case "call" if len(self.waiting) < 2:
                call(store, prefetcher, adapter)
                self.waiting.append(adapter)
            case "leave" if self.waiting:
                store.retract(self.waiting.pop(rng.randrange(len(self.waiting))).digest)
            case "lease" if self.waiting and len(self.held) < 2:
                found = store.acquire(self.waiting[0])
                if isinstance(found, Lease):
                    self.held.append(found)
                    store.retract(self.waiting.pop(0).digest)
            case "release" if self.held:
                store.release(self.held.pop(rng.randrange(len(self.held))), [])
            case "want":
                chosen = rng.sample(self.world.adapters, rng.randint(0, 4))
                wants = [want(a, rng.random(), tier=rng.choice(["device", "host"])) for a in chosen]
                prefetcher.want(wanted(*wants, seconds=rng.choice([0.0, 0.005, 60.0])))
            case "end":
                rng.choice([prefetcher.clear, lambda: prefetcher.cancel(adapter.digest)])()
                prefetcher._rests.clear()
            case "wait":
                time.sleep(0.002)
        store.poll()
        prefetcher.poll()
        self.check()

    def check(self) -> None:
        store = self.store
        assert self.prefetcher.underway <= MAX_AT_ONCE
        assert check_memory(store) == []
        for held in self.held:
            for layer in range(LAYERS):
                if store.state(held, layer) == LayerState.DEVICE:
                    assert_layer(self.world, held.digest, store.table, store.pool.data, held.slot, layer)

    def leave(self) -> None:
        for adapter in self.waiting:
            self.store.retract(adapter.digest)
        for held in self.held:
            self.store.release(held, [])


@pytest.mark.parametrize("seed", range(6))
def test_drawn_calls_wants_and_faults_leave_nothing_behind(
    world: World, make_prefetcher: MakePrefetcher, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """No layer is wrong and no page has two owners; at the end all is free."""
    monkeypatch.setattr(fetch, "BACK_OFF", 0.001)
    if seed % 2:
        monkeypatch.setattr(ranges, "FIRST_RANGE", 1)
        monkeypatch.setattr(ranges, "LARGEST_RANGE", 1)
    links = {"load_link": LinkConfig(5e7), "store_link": LinkConfig(2e7, 1e-4)}
    store, prefetcher, stile = make_prefetcher(1.0, host_memory=1 << 20, **links)
    store.hosts.failure_memory = 0.0
    flaky, read = Flaky(seed), stile.get_range_into

    def spoilt(key: str, start: int, buffer: memoryview, _arrived: Arrived | None = None) -> int:
        found = read(key, start, buffer)  # what comes late may be spoilt first
        other = flaky(start, buffer)
        return found if other is None else other

    monkeypatch.setattr(stile, "get_range_into", spoilt)
    stile.open_all()
    caller = Caller(world, store, prefetcher, seed)
    for _ in range(150):
        caller.step()
    caller.leave()
    prefetcher._rests.clear()
    for adapter in world.adapters:
        store.discard(adapter.digest)
    prefetcher.want(wanted(*map(want, world.adapters)))
    poll_until(store, prefetcher, lambda: prefetcher.underway > 0)
    prefetcher.clear()
    assert_nothing_held(store, prefetcher)
    assert not store.table.rank.any() and not store.hosts.table.rank.any()
