"""How many bytes a node says are on their way to its device."""

from __future__ import annotations

import pytest

from cluster.messages import Adapter
from node_agent.adapter_memory.layout import ROW_ALIGN
from node_agent.adapter_memory.store import AdapterStore
from node_agent.leases import LayerState, NoRoom
from tests.node_agent.adapter_world import LAYERS, Turnstile, World, lease, loaded_lease, starts, states, until


@pytest.mark.usefixtures("by_layer")
def test_layers_count_until_they_are_there(
    store: AdapterStore, turnstile: Turnstile, world: World, adapter: Adapter
) -> None:
    assert store.loading_bytes == 0
    held = lease(store, adapter)
    sizes = [sum(span.end - span.begin for span in spans) * ROW_ALIGN for spans in store.layout(held).spans]
    assert store.loading_bytes == sum(sizes)
    turnstile.let(starts(world, adapter)[0])
    until(store, lambda: states(store, held)[0] == LayerState.DEVICE)
    assert states(store, held) == [LayerState.DEVICE] + [LayerState.NO] * (LAYERS - 1)
    assert store.loading_bytes == sum(sizes[1:])
    turnstile.open_all()
    until(store, lambda: store.loaded(held))
    assert store.loading_bytes == 0
    store.release(held, ())


def test_an_adapter_that_is_awaited_counts_before_it_has_room(world: World) -> None:
    store = world.store(adapter_slots=1)
    try:
        first, second = world.adapters[:2]
        held = loaded_lease(store, first)
        store.announce(second)
        until(store, lambda: isinstance(store.acquire(second), NoRoom))
        host = store.hosts.get(second.digest)
        assert host is not None and host.layout is not None
        assert store.loading_bytes == host.layout.live > 0
        store.retract(second.digest)
        assert store.loading_bytes == 0
        store.release(held, ())
    finally:
        store.close()
