"""Loads by layer: forced orders of arrival, spoilt reads, holds of CPU workers, and host memory seen from outside."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adapters.artifact import LayerBlock
from adapters.store import Arrived
from cluster.messages import Adapter
from node_agent.adapter_memory import device_copy, ranges
from node_agent.adapter_memory.device_copy import DeviceCopy
from node_agent.adapter_memory.fetch import RANGES_IN_FLIGHT
from node_agent.adapter_memory.integrity import check_memory
from node_agent.adapter_memory.ranges import plan_ranges
from node_agent.adapter_memory.store import AdapterStore
from node_agent.leases import LayerState, Lease, LoadFailed, Pending, TooLarge
from node_agent.types import GROUPS
from tests.node_agent.adapter_world import (
    LAYERS,
    Turnstile,
    World,
    assert_contents,
    assert_layer,
    host_slot,
    lease,
    loaded_lease,
    measured,
    starts,
    states,
    until,
)


def assert_views(store: AdapterStore, held: Lease, layer: int) -> None:
    """The layer's pieces hold the rows that the table names."""
    table, groups = store.table, store.layer_weights(held, layer)
    for group, members in GROUPS.items():
        ranks = [int(table.rank[held.slot, layer, p]) for p in members]
        assert sum(piece.a.shape[1] for piece in groups.get(group, ())) == sum(ranks)
        for piece in groups.get(group, ()):
            assert not piece.a.isnan().any()


@pytest.mark.usefixtures("by_layer")
@pytest.mark.parametrize("seed", range(6))
def test_layers_go_on_in_whatever_order_they_arrive(
    store: AdapterStore, turnstile: Turnstile, world: World, adapter: Adapter, seed: int
) -> None:
    rng = random.Random(seed)
    held, offsets, arrived = lease(store, adapter), starts(world, adapter), set()
    with pytest.raises(RuntimeError, match=r"layer 2 .* before it is on the device"):
        store.layer_weights(held, 2)
    while len(arrived) < LAYERS:
        waiting = turnstile.await_waiting(min(RANGES_IN_FLIGHT, LAYERS - len(arrived)))
        assert len(waiting) <= RANGES_IN_FLIGHT
        assert not store.loaded(held)
        layer = offsets.index(rng.choice(waiting))
        turnstile.let(offsets[layer])
        arrived.add(layer)
        until(store, lambda at=layer: store.state(held, at) == LayerState.DEVICE)  # type: ignore[misc]
        for other in range(LAYERS):
            assert store.state(held, other) == (LayerState.DEVICE if other in arrived else LayerState.NO)
        for there in arrived:
            assert_layer(world, adapter.digest, store.table, store.pool.data, held.slot, there)
            assert_layer(world, adapter.digest, store.hosts.table, store.hosts.pool.data, host_slot(store, held), there)
            assert_views(store, held, there)
        assert check_memory(store) == []
    until(store, lambda: store.loaded(held))
    assert_contents(store, world, held)
    assert [weights.keys() for weights in store.weights(held)] == [
        store.layer_weights(held, layer).keys() for layer in range(LAYERS)
    ]
    assert sorted(turnstile.reads) == offsets
    store.release(held, [])


class Permits:
    """A link that lets the test carry one layer after the other."""

    def __init__(self) -> None:
        self.asked = 0
        self._turnstile = Turnstile(self)  # type: ignore[arg-type]

    def get_range_into(self, key: str, start: int, buffer: memoryview, arrived: Arrived | None = None) -> int:
        return 0

    def carry(self, size: int) -> None:
        self.asked += 1
        self._turnstile.get_range_into("", self.asked, memoryview(b""))

    def let_one(self) -> None:
        (waiting,) = self._turnstile.await_waiting(1)
        self._turnstile.let(waiting)


@pytest.mark.parametrize("late", [False, True])
def test_the_copy_takes_layers_in_the_order_it_is_told(
    store: AdapterStore, turnstile: Turnstile, world: World, adapter: Adapter, late: bool
) -> None:
    turnstile.open_all()
    first = lease(store, adapter)
    until(store, lambda: store.loaded(first))
    store.release(first, [])
    assert store.discard(adapter.digest)
    link = Permits()
    store.loader.device_link = link  # type: ignore[assignment]
    order = [3, 4, 1, 2, 0]
    held = store.acquire(adapter, None if late else order)
    assert isinstance(held, Lease) and store.source(held) == "host"
    if late:  # layer 0 has been taken already
        link._turnstile.await_waiting(1)
        store.set_order(held, order)
        order = [0, 3, 4, 1, 2]
    for count, layer in enumerate(order, 1):
        assert states(store, held).count(LayerState.HOST) == LAYERS + 1 - count
        link.let_one()
        until(store, lambda at=layer: store.state(held, at) == LayerState.DEVICE)  # type: ignore[misc]
        assert_views(store, held, layer)
    until(store, lambda: store.loaded(held))
    assert_contents(store, world, held)
    with pytest.raises(ValueError, match="must name each of them once"):
        store.set_order(held, [0, 1, 2, 3, 3])
    store.release(held, [])


def test_host_memory_too_small(world: World, make_store: Callable[..., AdapterStore]) -> None:
    found = measured(make_store(host_memory=64 << 10), max(world.adapters, key=lambda a: a.bytes))
    assert isinstance(found, TooLarge)
    assert found.have == 64 << 10 < found.need


def test_a_hold_keeps_host_pages(store: AdapterStore, turnstile: Turnstile, world: World, adapter: Adapter) -> None:
    """Not even an adapter that needs the room gets them, and forgetting the adapter frees them only afterwards."""
    turnstile.open_all()
    held = lease(store, adapter)
    until(store, lambda: store.loaded(held))
    hold, second = store.hold_host(held), store.hold_host(held)
    assert hold is not None and second is not None and hold.slot == host_slot(store, held)
    pages = list(hold.pages or ())
    assert store.hosts._make_room(store.hosts.memory, 1) is None
    store.hosts.forget(hold)
    assert store.hold_host(held) is None, "it is on its way out"
    store.release(held, [])
    store.release_host(hold)
    store.poll()
    assert hold.pages == pages
    assert check_memory(store) == []
    assert_layer(world, adapter.digest, store.hosts.table, store.hosts.pool.data, hold.slot, 0)
    store.release_host(second)
    store.poll()
    assert hold.pages is None and store.hosts.used == 0
    assert not store.hosts.table.rank.any()
    with pytest.raises(RuntimeError, match="released twice"):
        store.release_host(second)
    again = lease(store, adapter)
    with pytest.raises(RuntimeError, match="not in host memory"):
        host_slot(store, again)
    store.release(again, [])


@pytest.mark.usefixtures("by_layer")
def test_a_hold_outlives_a_failed_load(
    store: AdapterStore, turnstile: Turnstile, world: World, adapter: Adapter
) -> None:
    offsets = starts(world, adapter)
    held = lease(store, adapter)
    turnstile.let(offsets[0])
    until(store, lambda: store.state(held, 0) == LayerState.DEVICE)
    hold = store.hold_host(held)
    assert hold is not None

    def spoil(start: int, buffer: memoryview) -> int:
        raise ValueError("no answer at all")

    turnstile.spoil = spoil
    turnstile.open_all()
    until(store, lambda: store.failure(held) is not None)
    store.release(held, [])
    store.poll()
    assert_layer(world, adapter.digest, store.hosts.table, store.hosts.pool.data, hold.slot, 0)
    assert check_memory(store) == []
    store.release_host(hold)
    store.poll()
    assert store.hosts.used == 0


class Breaking:
    """A link that fails at its second transfer."""

    def __init__(self) -> None:
        self.carried = 0

    def carry(self, size: int) -> None:
        self.carried += 1
        if self.carried == 2:
            raise OSError("the device is gone")


@pytest.mark.usefixtures("by_layer")
def test_a_copy_that_fails_leaves_the_pages_to_the_fetch_that_still_runs(
    store: AdapterStore, turnstile: Turnstile, world: World, adapter: Adapter
) -> None:
    offsets, link = starts(world, adapter), store.loader.device_link
    store.loader.device_link = Breaking()  # type: ignore[assignment]
    held = lease(store, adapter)
    host = store.hosts.get(adapter.digest)
    assert host is not None
    for layer in (0, 1):
        turnstile.await_waiting(RANGES_IN_FLIGHT)
        turnstile.let(offsets[layer])
    until(store, lambda: "the device is gone" in getattr(store.failure(held), "reason", "") and not host.copying)
    store.release(held, [])
    store.poll()
    assert host.pages is not None and store.hosts.pool.pages.owner[host.pages[0]] == adapter.digest
    assert check_memory(store) == []
    store.loader.device_link = link
    again = lease(store, adapter)  # beside the load that is ending
    turnstile.open_all()
    until(store, lambda: store.loaded(again) and host.pages is None)
    assert_contents(store, world, again)
    assert check_memory(store) == []
    store.release(again, [])


CHILD = """
import json, sys
import msgspec, torch
from node_agent.adapter_memory.host_map import HostMap, attach
view = attach(msgspec.json.decode(sys.argv[1], type=HostMap))
slot = int(sys.argv[2])
table = view.table
found = []
for layer, projection in (table.rank[slot] > 0).nonzero().tolist():
    first = int(table.first[slot, layer, projection, 0])
    at = int(table.row_offset[first]) * 64 // view.pool.element_size()
    found.append([layer, projection, int(table.rank[slot, layer, projection]),
                  float(table.scale[slot, layer, projection]), float(view.pool[at])])
print(json.dumps([found, torch.cuda.is_initialized()]))
"""


def test_another_process_reads_host_memory(
    store: AdapterStore, turnstile: Turnstile, adapter: Adapter, tmp_path: Path
) -> None:
    turnstile.open_all()
    held = lease(store, adapter)
    until(store, lambda: store.loaded(held))
    exported, slot = store.host_map, host_slot(store, held)
    command = [sys.executable, "-c", CHILD, msgspec.json.encode(exported).decode(), str(slot)]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, pass_fds=(exported.pool_fd, exported.table_fd), cwd=root, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found, cuda = json.loads(done.stdout)
    assert not cuda
    table = store.table
    expected = [
        [*where, int(table.rank[held.slot][where]), float(table.scale[held.slot][where])]
        for where in map(tuple, (table.rank[held.slot] > 0).nonzero().tolist())
    ]
    assert [line[:4] for line in found] == expected
    for layer, projection, *_, value in found:
        at = int(table.row_offset[table.first[held.slot, layer, projection, 0]]) * 16
        assert value == float(store.pool.data[at])
    store.release(held, [])


@given(
    sizes=st.lists(st.sampled_from([0, 64, 1 << 19, 3 << 20, 9 << 20]), max_size=24),
    have=st.sampled_from([0, 4096, 4160, 1 << 20]),
)
def test_ranges_cover_every_layer_once(sizes: list[int], have: int) -> None:
    offset, blocks = 4096, []
    for size in sizes:
        blocks.append(LayerBlock(offset, size, "", ()))
        offset += size
    found = plan_ranges(blocks, have)
    covered = [layer for r in found for layer in range(r.first, r.end) if sizes[layer]]
    assert covered == [layer for layer, size in enumerate(sizes) if size]
    for r in found:
        assert (r.start, r.size) == (blocks[r.first].offset, sum(sizes[r.first : r.end]))
        assert r.size <= ranges.LARGEST_RANGE or sum(map(bool, sizes[r.first : r.end])) == 1
    here = {layer for layer, block in enumerate(blocks) if block.size and block.offset + block.size <= have}
    assert here == {layer for r in found if r.start + r.size <= have for layer in range(r.first, r.end) if sizes[layer]}
    assert sum(r.start + r.size <= have for r in found) == bool(here), "they are one range, and no other is like it"


@pytest.mark.parametrize("cut", [0, 1])
def test_the_first_layers_come_with_the_header(
    store: AdapterStore, turnstile: Turnstile, world: World, adapter: Adapter, cut: int
) -> None:
    """Only what is not wholly there is read: here the last layer, if anything."""
    turnstile.spoil_first = lambda data: data[: len(data) - cut]
    turnstile.open_all()
    held = lease(store, adapter)
    until(store, lambda: store.loaded(held))
    assert turnstile.reads == starts(world, adapter)[-1:] * cut
    assert_contents(store, world, held)
    store.release(held, [])


def test_a_first_layer_that_came_spoilt_is_read_again(
    store: AdapterStore, turnstile: Turnstile, world: World, adapter: Adapter
) -> None:
    offsets = starts(world, adapter)
    turnstile.spoil_first = lambda data: data[: offsets[0]] + bytes([data[offsets[0]] ^ 16]) + data[offsets[0] + 1 :]
    turnstile.open_all()
    held = lease(store, adapter)
    until(store, lambda: store.loaded(held))
    assert turnstile.reads == offsets[:1]
    assert_contents(store, world, held)
    store.release(held, [])


def test_one_load_however_many_ask_for_it(
    store: AdapterStore, turnstile: Turnstile, world: World, adapter: Adapter
) -> None:
    for _ in range(4):
        store.announce(adapter)
    assert isinstance(store.acquire(adapter), Pending)
    turnstile.open_all()
    leases = [lease(store, adapter) for _ in range(4)]
    until(store, lambda: store.loaded(leases[0]))
    assert len(turnstile.reads) == 1 and len({held.slot for held in leases}) == 1
    assert torch.equal(store.hosts.table.scale[host_slot(store, leases[0])], store.table.scale[leases[0].slot])
    for held in leases:
        store.retract(adapter.digest)
        store.release(held, [])
    assert not isinstance(store.acquire(adapter), LoadFailed)
    store.release(leases[0], [])


def test_small_layers_cross_together(world: World, adapter: Adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    """From host memory in portions, the largest of which has what fits: every row is the file's, in fewer copies."""
    store, copies = world.store(), list[list[int]]()
    real = DeviceCopy._enqueue

    def note(self: DeviceCopy, portion: list[int]) -> None:
        copies.append(portion)
        real(self, portion)

    monkeypatch.setattr(DeviceCopy, "_enqueue", note)
    try:
        store.release(loaded_lease(store, adapter), ())
        sizes = store.device[adapter.digest].layout.moved
        few = sizes[0] + sizes[1]
        for most, bandwidth, portions in (
            (sum(sizes), math.inf, [[0, 1, 2, 3, 4]]),
            (few, math.inf, None),
            (0, math.inf, [[i] for i in range(5)]),
            (sum(sizes), (few + 0.5) / device_copy.PORTION_S, None),
            (sum(sizes), 1.0, [[i] for i in range(5)]),
        ):
            assert store.discard(adapter.digest)
            monkeypatch.setattr(device_copy, "PORTION_BYTES", most)
            store.loader.bandwidth = bandwidth
            copies.clear()
            held = loaded_lease(store, adapter)
            assert_contents(store, world, held)
            assert [layer for portion in copies for layer in portion] == list(range(LAYERS))
            assert copies == portions or (portions is None and copies[0] == [0, 1] and len(copies) < LAYERS)
            store.release(held, ())
    finally:
        store.close()
