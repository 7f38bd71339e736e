"""vLLM's slots: who gets one, who leaves one, and what failures and drawn orders leave."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.messages import Adapter
from node_agent.device_event import ENDED
from node_agent.leases import InUse, Lease, LoadFailed, NoRoom, Pending, TooLarge
from node_agent.vllm.driver import AbortSent
from tests.node_agent.vllm.folder_world import BYTES, MAX_RANK, SLOT_BYTES, SlotWorld, put_adapter

ADAPTERS = 5


@pytest.fixture
def world(tmp_path: Path) -> Iterator[SlotWorld]:
    made = SlotWorld(tmp_path)
    with closing(made.store):
        yield made


@pytest.fixture
def adapters(world: SlotWorld) -> list[Adapter]:
    return [put_adapter(world.objects, at) for at in range(ADAPTERS)]


def leased(world: SlotWorld, adapter: Adapter) -> Lease:
    found = world.acquire(adapter)
    assert isinstance(found, Lease)
    return found


def test_a_lease_is_loaded_once_vllm_has_the_adapter(world: SlotWorld, adapters: list[Adapter]) -> None:
    assert isinstance(world.store.acquire(adapters[0]), Pending)
    lease = leased(world, adapters[0])
    assert not world.store.loaded(lease) and world.store.source(lease) == "host"
    world.vllm.end_load(world.store)
    assert world.store.loaded(lease) and world.store.tier(adapters[0].digest) == "device"
    assert world.store.free_bytes == SLOT_BYTES


def test_an_idle_adapter_makes_room_and_a_leased_one_does_not(world: SlotWorld, adapters: list[Adapter]) -> None:
    leases = [leased(world, adapter) for adapter in adapters[:2]]
    assert isinstance(world.acquire(adapters[2]), NoRoom), "both still load"
    for _ in leases:
        world.vllm.end_load(world.store)
    assert isinstance(world.acquire(adapters[2]), NoRoom), "both are leased"
    assert not world.store.fits_without(adapters[2], ())
    world.store.release(leases[0], [])
    assert world.store.fits_without(adapters[2], ())
    assert isinstance(world.acquire(adapters[2], spared={adapters[0].digest}), NoRoom)
    leased(world, adapters[2])
    assert not world.store.ready(adapters[0].digest) and world.store.ready(adapters[1].digest)


def test_an_adapter_stays_until_vllm_has_the_order_to_abort(world: SlotWorld, adapters: list[Adapter]) -> None:
    leases = [leased(world, adapter) for adapter in adapters[:2]]
    for _ in leases:
        world.vllm.end_load(world.store)
    sent = AbortSent()
    world.store.release(leases[0], [ENDED, sent])
    world.store.poll()
    assert isinstance(world.acquire(adapters[2]), NoRoom)
    sent.set()
    world.store.poll()
    leased(world, adapters[2])


def test_a_pinned_adapter_keeps_its_slot(world: SlotWorld, adapters: list[Adapter]) -> None:
    for adapter in adapters[:2]:
        world.store.release(leased(world, adapter), [])
        world.vllm.end_load(world.store)
    world.store.pin([adapters[0].digest])
    leased(world, adapters[2])
    assert world.store.ready(adapters[0].digest)
    world.vllm.end_load(world.store)
    assert isinstance(world.acquire(adapters[3]), NoRoom)


def test_a_failed_load_fails_its_leases_and_frees_the_slot(world: SlotWorld, adapters: list[Adapter]) -> None:
    leases = [leased(world, adapters[0]) for _ in range(2)]
    world.vllm.end_load(world.store, "it has a bias")
    assert world.store.failure(leases[0]) == LoadFailed("it has a bias")
    assert isinstance(world.acquire(adapters[0]), LoadFailed), "while it is leased"
    for lease in leases:
        world.store.release(lease, [])
    assert not world.store.device and world.store.free_bytes == 2 * SLOT_BYTES
    leased(world, adapters[0])
    world.vllm.end_load(world.store)


def test_what_vllm_can_not_hold_is_refused(tmp_path: Path) -> None:
    world = SlotWorld(tmp_path, memory=2 * BYTES)
    with closing(world.store):
        high = world.store.acquire(put_adapter(world.objects, 1, rank=MAX_RANK + 1))
        assert isinstance(high, LoadFailed) and "max_lora_rank 16" in high.reason
        large = put_adapter(world.objects, 2, 3 * BYTES)
        found = world.store.acquire(large)
        world.until(lambda: world.tier.lacks_room(large.digest), world.store.poll)
        found = world.store.acquire(large)
        assert isinstance(found, TooLarge) and found.have == 2 * BYTES
        assert world.tier.get(large.digest) is None


def test_operators_evict_what_nobody_uses(world: SlotWorld, adapters: list[Adapter]) -> None:
    lease = leased(world, adapters[0])
    with pytest.raises(InUse, match="1 requests"):
        world.store.evict(adapters[0].digest)
    world.store.release(lease, [])
    with pytest.raises(InUse, match="being loaded"):
        world.store.evict(adapters[0].digest)
    world.vllm.end_load(world.store)
    assert world.store.evict(adapters[0].digest)
    world.store.poll()
    assert not world.store.evict(adapters[0].digest)
    assert not world.vllm.held and not world.files()
    assert world.store.states().adapters == []


def test_a_slot_outlives_its_folder(tmp_path: Path) -> None:
    """Host memory for one adapter, two slots: vLLM has its own copies."""
    world = SlotWorld(tmp_path, memory=int(1.5 * BYTES))
    with closing(world.store):
        for at in range(2):
            world.store.release(leased(world, put_adapter(world.objects, at)), [])
            world.vllm.end_load(world.store)
        assert [resident.tier for resident in world.store.residents()] == ["device"] * 2
        assert len(world.files()) == 1


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["call", "call", "end", "load", "load", "fail", "place", "discard", "evict", "abandon", "poll"]
        ),
        st.integers(0, ADAPTERS - 1),
    ),
    max_size=60,
)


@given(ACTIONS)
def test_drawn_orders_leave_nothing(actions: list[tuple[str, int]]) -> None:
    """PlayedVllm checks that no more adapters are loaded than there are slots, and none is removed that is in use."""
    with tempfile.TemporaryDirectory() as root:
        world = SlotWorld(Path(root), memory=3 * BYTES)
        store, vllm = world.store, world.vllm
        with closing(store):
            adapters = [put_adapter(world.objects, at) for at in range(ADAPTERS)]
            leases: list[Lease] = []
            waiting: list[Adapter] = []
            aborts: list[AbortSent] = []
            for action, at in actions:
                adapter = adapters[at]
                if action == "call":
                    store.announce(adapter)
                    found = store.acquire(adapter)
                    if isinstance(found, Lease):
                        store.retract(adapter.digest)
                        leases.append(found)
                    else:
                        waiting.append(adapter)
                elif action == "abandon" and waiting:
                    store.retract(waiting.pop(at % len(waiting)).digest)
                elif action == "end" and leases:
                    aborts.append(AbortSent())
                    store.release(leases.pop(at % len(leases)), [aborts[-1]])
                elif action in ("load", "fail") and vllm.loading:
                    vllm.end_load(store, "bad" if action == "fail" else "")
                elif action == "place":
                    store.place(adapter)
                elif action == "discard":
                    store.discard(adapter.digest)
                elif action == "evict":
                    try:
                        store.evict(adapter.digest)
                    except InUse:
                        assert store.on_device(adapter.digest) or store.hosts.get(adapter.digest)
                elif action == "poll":
                    for sent in aborts[: at + 1]:
                        sent.set()
                    store.poll()
                assert set(vllm.held) | {slot.number for slot in vllm.loading} == {
                    slot.number for slot in store.device.values() if slot.failure is None
                }
                assert world.tier.used <= world.tier.memory
            for sent in aborts:
                sent.set()
            for lease in leases:
                store.release(lease, [])
            for adapter in waiting:
                store.retract(adapter.digest)
            while vllm.loading:
                vllm.end_load(store)
            store.poll()
            assert not any(slot.leases for slot in store.device.values())
            assert store.free_bytes == 2 * SLOT_BYTES and not store.loading_bytes
            for adapter in adapters:
                world.until(lambda a=adapter: not (f := world.tier.get(a.digest)) or not f.in_use, store.poll)  # type: ignore[misc]
                store.evict(adapter.digest)
            world.until(lambda: not world.files(), store.poll)
            assert not vllm.held and not world.tier.used
        assert not world.root.exists()
