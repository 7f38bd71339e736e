"""Whether adapter memory is as its books say: made for idle moments and for tests, it reads the whole table."""

from __future__ import annotations

import numpy as np

from adapters.base_model import PROJECTIONS
from node_agent.adapter_memory.pool import Pool
from node_agent.adapter_memory.store import AdapterStore, DeviceAdapter


def check_memory(store: AdapterStore) -> list[str]:
    """One line for each thing that is wrong; empty when all is well. Waits for the device to have read the table."""
    found = [f"device: {line}" for line in store.pool.pages.problems()]
    found += [f"host: {line}" for line in store.hosts.pool.pages.problems()]
    found += _owners("device", store.pool, {digest: [e.pages] for digest, e in store.device.items()})
    hosts = store.hosts.owned().items()
    found += _owners("host", store.hosts.pool, {digest: [h.pages or [] for h in list_] for digest, list_ in hosts})
    rank = store.table.rank.cpu().numpy()
    loaded = {e.slot: (digest, e) for digest, e in store.device.items() if e.weights is not None}
    for slot in np.flatnonzero(rank.any(axis=(1, 2))).tolist():
        if slot not in loaded:
            found.append(f"slot {slot} is no adapter's and its ranks are not 0")
    for slot, (digest, entry) in loaded.items():
        found += _check_adapter(store, digest, entry, rank[slot])
    return found


def heal(store: AdapterStore) -> list[str]:
    """What `check_memory` finds. An adapter whose part of the table is wrong and that nobody uses leaves the device, so
    that the next request for it loads it anew."""
    found = check_memory(store)
    for digest in [d for d in store.device if any(line.startswith(f"adapter {d},") for line in found)]:
        store.discard(digest)
    return found


def _owners(tier: str, pool: Pool, owned: dict[str, list[list[int]]]) -> list[str]:
    expected: dict[int, str] = {}
    found: list[str] = []
    for digest, runs in owned.items():
        for page in (page for run in runs for page in run):
            if page in expected:
                found.append(f"{tier}: page {page} belongs to {expected[page]} and to {digest}")
            expected[page] = digest
    for page, owner in enumerate(pool.pages.owner):
        if expected.get(page) != owner:
            found.append(f"{tier}: page {page} is booked for {owner} and held by {expected.get(page)}")
    return found


def _check_adapter(store: AdapterStore, digest: str, entry: DeviceAdapter, rank: np.ndarray) -> list[str]:
    """Lines that name adapter, layer and projection, for each pair that the table gives wrongly."""
    layout, table = entry.layout, store.table
    positions = layout.positions(entry.pages)
    scale, first = table.scale[entry.slot].cpu().numpy(), table.first[entry.slot].cpu().numpy()
    offsets = table.row_offset[entry.run : entry.run + layout.rows].cpu().numpy()
    wrong_row = offsets != positions
    found: list[str] = []
    for layer, projection in np.argwhere((rank != layout.rank) | (layout.rank > 0)).tolist():
        where = (layer, projection)
        r = int(layout.rank[where])
        rows = [slice(at, at + r) for at in layout.first[where].tolist()]
        what = {
            "rank": rank[where] != r,
            "scale": r and scale[where] != layout.scale[where],
            "first": r and bool((first[where] != layout.first[where] + entry.run).any()),
            "row_offset": r and any(bool(wrong_row[side].any()) for side in rows),
        }
        wrong = ", ".join(name for name, is_wrong in what.items() if is_wrong)
        if wrong:
            found.append(f"adapter {digest}, layer {layer}, projection {PROJECTIONS[projection]}: wrong {wrong}")
    return found
