"""Pages and layouts: sizes, packing, host memory, integrity, and numbers of one adapter that must not reach another."""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.artifact import ArtifactHeader, LayerBlock, StoredPair
from adapters.base_model import BaseModel, projection_widths
from node_agent.adapter_memory.host_memory import HostMemory
from node_agent.adapter_memory.integrity import check_memory, heal
from node_agent.adapter_memory.layout import ROW_ALIGN, contiguous_runs, lay_out, row_units
from node_agent.adapter_memory.pages import PageMap, choose_page_size
from node_agent.adapter_memory.pool import Pool
from node_agent.adapter_memory.store import AdapterStore
from node_agent.adapter_memory.weights import view_weights
from node_agent.engine_channel import WakeUp
from node_agent.engine_loop import Loop
from node_agent.engine_process import ready_message
from node_agent.types import GROUPS
from tests.node_agent.adapter_world import World, assert_contents, host_slot, loaded_lease
from tests.node_agent.memory_usage import device_usage, host_usage
from tests.support.draws import draws
from tests.support.local_engine import MakeEngine


def base_of(hidden: int, inner: int, heads: int, kv: int, layers: int) -> BaseModel:
    config = {
        "hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads, "num_key_value_heads": kv
    }  # fmt: skip
    return BaseModel("drawn", "f" * 64, "llama", layers, hidden, 512, 512, projection_widths(config))


def header_of(ranks: list[dict[int, int]]) -> ArtifactHeader:
    """Per layer, rank per projection."""
    layers = [tuple(StoredPair(p, rank, 0.5 + p, 0, 0) for p, rank in sorted(layer.items())) for layer in ranks]
    return ArtifactHeader(1, "d", "f" * 64, "float32", tuple(LayerBlock(0, 0, "", pairs) for pairs in layers))


LLAMA_7B = base_of(4096, 11008, 32, 32, 32)
BASES = st.builds(
    base_of,
    hidden=st.sampled_from([32, 48, 64]),
    inner=st.sampled_from([40, 172, 200]),
    heads=st.just(4),
    kv=st.sampled_from([1, 2, 4]),
    layers=st.integers(1, 3),
)
RANKS = st.dictionaries(st.integers(0, 6), st.integers(1, 40))


@pytest.mark.parametrize(
    ("base", "itemsize", "size"),
    [
        (LLAMA_7B, 2, 2 << 20),
        (base_of(4096, 14336, 32, 8, 32), 2, 2 << 20),
        (base_of(576, 1536, 9, 3, 30), 2, 256 << 10),
        (base_of(64, 172, 8, 4, 5), 4, 16 << 10),
    ],
    ids=["llama-7b", "llama-8b", "smollm2", "stories"],
)
def test_page_size(base: BaseModel, itemsize: int, size: int) -> None:
    assert choose_page_size(base, itemsize) == size


@given(base=BASES, itemsize=st.sampled_from([2, 4]))
def test_every_row_fits_a_page(base: BaseModel, itemsize: int) -> None:
    size = choose_page_size(base, itemsize)
    assert size == 1 << (size.bit_length() - 1) and size % ROW_ALIGN == 0
    assert size >= max(row_units(w, itemsize) for pair in base.widths for w in pair) * ROW_ALIGN


@given(base=BASES, ranks=st.data(), itemsize=st.sampled_from([2, 4]), page_units=st.integers(16, 64))
def test_rows_are_packed(base: BaseModel, ranks: st.DataObject, itemsize: int, page_units: int) -> None:
    """No two rows overlap, none crosses a page border, each layer's rows lie in its spans, waste is bounded."""
    drawn = [ranks.draw(RANKS) for _ in range(base.num_layers)]
    layout = lay_out(header_of(drawn), base, itemsize, page_units)
    rows: list[tuple[int, int]] = []
    for layer, pairs in enumerate(layout.layers):
        assert {pair.projection: pair.rank for pair in pairs} == drawn[layer]
        covered = {s.page * page_units + u for s in layout.spans[layer] for u in range(s.begin, s.end)}
        for pair in pairs:
            for first, width in zip((pair.a, pair.b), base.widths[pair.projection], strict=True):
                units = row_units(width, itemsize)
                for at in layout.place[first : first + pair.rank].tolist():
                    rows.append((at, at + units))
                    assert at // page_units == (at + units - 1) // page_units
                    assert set(range(at, at + units)) <= covered
    assert len(rows) == layout.rows
    assert (layout.place[1:] > layout.place[:-1]).all(), "rows are numbered in the order in which they lie"
    assert all(before[1] <= after[0] for before, after in zip(sorted(rows), sorted(rows)[1:], strict=False))
    widest = max(row_units(w, itemsize) for pair in base.widths for w in pair)
    used = sum(end - begin for begin, end in rows)
    assert layout.pages <= math.ceil(used / (page_units - widest + 1))


@given(base=BASES, ranks=st.data(), page_units=st.integers(16, 40), seed=st.integers(0, 9))
def test_pieces_add_up(base: BaseModel, ranks: st.DataObject, page_units: int, seed: int) -> None:
    """Over scattered pages, the sum of a group's pieces is the product with its whole A and B."""
    layout = lay_out(header_of([ranks.draw(RANKS) for _ in range(base.num_layers)]), base, 4, page_units)
    torch.manual_seed(seed)
    pages = random.Random(seed).sample(range(layout.pages + 3), layout.pages)
    pool = Pool(torch.full(((layout.pages + 3) * page_units * 16,), torch.nan), page_units * ROW_ALIGN)
    positions = layout.positions(pages)
    for pairs in layout.layers:
        for pair in pairs:
            for first, width in zip((pair.a, pair.b), base.widths[pair.projection], strict=True):
                for at in positions[first : first + pair.rank].tolist():
                    pool.matrix(at, 1, width).normal_()
    views = view_weights(pool, positions, layout, base)
    for layer, pairs in enumerate(layout.layers):
        assert set(views[layer]) == {g for g, members in GROUPS.items() if any(p.projection in members for p in pairs)}
        for pair in pairs:
            group, members = next((g, m) for g, m in GROUPS.items() if pair.projection in m)
            d_in, d_out = base.widths[pair.projection]
            a = torch.cat([pool.matrix(at, 1, d_in) for at in positions[pair.a : pair.a + pair.rank].tolist()])
            b = torch.cat([pool.matrix(at, 1, d_out) for at in positions[pair.b : pair.b + pair.rank].tolist()])
            total = torch.zeros(d_in, d_out, dtype=torch.float64)
            for piece in views[layer][group]:
                for i, low, high, part, scale in piece.parts:
                    if members[i] == pair.projection:
                        total += scale * piece.a[:, low:high].double() @ part.double()
            torch.testing.assert_close(total, pair.scale * a.T.double() @ b.double())


def test_waste_of_7b_adapters() -> None:
    """Ranks 8 to 128, attention only and all projections: below 2 % together."""
    page = choose_page_size(LLAMA_7B, 2) // ROW_ALIGN
    layouts = [
        lay_out(header_of([dict.fromkeys(range(n), rank)] * 32), LLAMA_7B, 2, page)
        for rank in (8, 16, 32, 64, 128)
        for n in (4, 7)
    ]
    assert 1 - sum(x.live for x in layouts) / sum(x.size for x in layouts) < 0.02


def test_runs() -> None:
    assert contiguous_runs(torch.tensor([0, 3, 6, 10, 13, 2]).numpy(), 3) == [(0, 3), (3, 5), (5, 6)]
    assert contiguous_runs(torch.tensor([]).numpy(), 3) == []


def test_page_map_names_a_wrong_owner() -> None:
    pages = PageMap(4)
    assert pages.take(3, "a") == [0, 1, 2]
    assert pages.take(2, "b") is None
    with pytest.raises(RuntimeError, match="page 1 belongs to a, not to b"):
        pages.give([1], "b")
    pages.give([1], "a")
    assert pages.take(2, "b") == [1, 3]
    pages.owner[1] = None
    assert pages.problems() == ["page 1 is not free and its owner is None"]


@settings(max_examples=draws(10))
@given(size=st.integers(0, 1 << 20))
def test_host_memory_is_one_shared_file(size: int) -> None:
    memory = HostMemory(size, 64 << 10, torch.float32, pinned=False)
    try:
        assert os.fstat(memory.fd).st_size == memory.pool.size == size // (64 << 10) * (64 << 10)
        if memory.pool.size:
            assert os.fstat(memory.fd).st_blocks * 512 >= memory.pool.size, "reserved, so that no later write can fail"
            memory.pool.data[-1] = 7.0
            assert os.pread(memory.fd, 4, memory.pool.size - 4) == torch.tensor([7.0]).numpy().tobytes()
    finally:
        memory.close()


def test_host_memory_that_is_not_there() -> None:
    with pytest.raises(ValueError, match=r"host_memory: \d+ bytes can't be reserved"):
        HostMemory(1 << 60, 1 << 20, torch.float32, pinned=False)


@pytest.mark.parametrize("what", ["rank", "scale", "first", "row_offset"])
def test_a_damaged_table_is_named_and_healed(world: World, make_store: Callable[..., AdapterStore], what: str) -> None:
    store = make_store()
    held = loaded_lease(store, world.adapters[0])
    layer, projection = (store.table.rank[held.slot] > 0).nonzero()[-1].tolist()
    where = (held.slot, layer, projection)
    if what == "row_offset":
        store.table.row_offset[store.table.first[where][0]] += 1
    else:
        getattr(store.table, what)[where] += 1
    name = ("q", "k", "v", "o", "gate", "up", "down")[projection]
    line = f"adapter {held.digest}, layer {layer}, projection {name}: wrong {what}"
    assert line in check_memory(store)
    assert line in heal(store)
    assert held.digest in store.device, "nothing in use is taken away"
    store.release(held, [])
    assert line in heal(store)
    assert check_memory(store) == []
    again = loaded_lease(store, world.adapters[0])
    assert_contents(store, world, again)
    store.release(again, [])


def test_a_damaged_host_table_is_named_and_healed(world: World, make_store: Callable[..., AdapterStore]) -> None:
    """CPU workers compute by it."""
    store = make_store()
    held = loaded_lease(store, world.adapters[0])
    slot, table = host_slot(store, held), store.hosts.table
    layer, projection = (table.rank[slot] > 0).nonzero()[0].tolist()
    table.scale[slot, layer, projection] += 1
    name = ("q", "k", "v", "o", "gate", "up", "down")[projection]
    line = f"host adapter {held.digest}, layer {layer}, projection {name}: wrong scale"
    hold = store.hold_host(held)
    assert hold is not None
    assert heal(store) == [line]
    assert heal(store) == [line], "a worker may read it"
    store.release_host(hold)
    assert heal(store) == [line]
    assert heal(store) == []
    assert_contents(store, world, held)
    store.release(held, [])


def test_an_idle_engine_looks_for_damage(
    make_engine: MakeEngine, drawn_adapters: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Not before it is time, and not while a request runs; what it finds is in the log."""
    engine = make_engine()
    adapter = engine.deploy(drawn_adapters[0])
    engine.submit([1, 403], 2, adapter)
    engine.run()
    loop = Loop(engine.engine, ready_message(engine.engine, engine.base), WakeUp(), lambda: True)
    engine.engine.store.table.rank[engine.engine.store.device[adapter.digest].slot] += 1
    loop._check_memory()
    loop._check_at = 0.0
    engine.submit([1, 403], 2)
    loop._check_memory()
    assert not caplog.records
    engine.run()
    loop._check_memory()
    assert all(record.reason.startswith(f"adapter {adapter.digest}, layer ") for record in caplog.records)  # type: ignore[attr-defined]
    assert len(caplog.records) == engine.base.num_layers * 7
    assert check_memory(engine.engine.store) == []
    assert loop._check_at > time.monotonic()


def test_usage_and_pins(world: World, make_store: Callable[..., AdapterStore]) -> None:
    store = make_store(adapter_slots=2)
    first, second = (loaded_lease(store, adapter) for adapter in world.adapters[:2])
    usage = device_usage(store)
    assert usage.pages["in_use"] * usage.page_bytes == usage.taken_bytes
    assert 0 < usage.live_bytes <= usage.taken_bytes <= usage.pool_bytes
    assert usage.utilisation == usage.live_bytes / usage.pool_bytes
    assert usage.adapters_per_gib == pytest.approx(2 * (1 << 30) / usage.pool_bytes)
    assert host_usage(store).adapters == 2
    store.pin([first.digest])
    for held in (first, second):
        store.release(held, [])
    assert device_usage(store).pages["pinned"] == len(store.device[first.digest].pages)
    third = loaded_lease(store, world.adapters[2])
    assert set(store.device) == {first.digest, third.digest}, "the pinned one was used earlier and yet stays"
    store.release(third, [])


def test_nan_stays_with_its_adapter(make_engine: MakeEngine, drawn_adapters: list[Path]) -> None:
    """One adapter's weights become NaN on the device: what shares batch and pages with it writes the same as before."""
    engine = make_engine(max_rows=4)
    good, bad = (engine.deploy(path) for path in drawn_adapters[:2])
    kinds = [good, None, bad, good]
    prompts = [[1, 403, 407, *range(20, 20 + i)] for i in range(4)]

    def run() -> list[list[int]]:
        requests = [engine.submit(p, 12, kind) for p, kind in zip(prompts, kinds, strict=True)]
        engine.run()
        return [engine.outcomes[request].tokens for request in requests]

    before = run()
    store = engine.engine.store
    for page in store.device[bad.digest].pages:  # its padding too
        at = page * store.pool.page_size // 4
        store.pool.data[at : at + store.pool.page_size // 4] = torch.nan
    after = run()
    assert [after[i] for i in (0, 1, 3)] == [before[i] for i in (0, 1, 3)]
