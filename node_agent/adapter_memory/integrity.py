"""Consistency check of adapter memory: owners of pages, and entries of the tables. It reads whole tables, so it is for
idle moments and tests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from adapters.base_model import PROJECTIONS
from node_agent.adapter_memory.layout import AdapterLayout
from node_agent.adapter_memory.loads import HostAdapter
from node_agent.adapter_memory.pool import Pool
from node_agent.adapter_memory.store import AdapterStore
from node_agent.adapter_memory.table import AdapterTable


def check_memory(store: AdapterStore) -> list[str]:
    """Returns one line per inconsistency of the store's pages and tables; none if all are consistent. Waits for the
    device."""
    problems = [f"device: {line}" for line in store.pool.pages.problems()]
    problems += [f"host: {line}" for line in store.hosts.pool.pages.problems()]
    problems += _owners("device", store.pool, {digest: [e.pages] for digest, e in store.device.items()})
    hosts = store.hosts.owned()
    problems += _owners("host", store.hosts.pool, {d: [h.pages or [] for h in list_] for d, list_ in hosts.items()})
    placed = [_Entry(f"adapter {d}", e.slot, e.run, e.layout, e.pages) for d, e in store.device.items()]
    problems += _check_table(store.table, "slot", placed)
    there = [host for same in hosts.values() for host in same]
    return problems + _check_table(store.hosts.table, "host slot", [_host_entry(host) for host in there])


def heal(store: AdapterStore) -> list[str]:
    """Repairs adapter memory, and returns the lines of `check_memory`. Unused adapters with wrong table entries are
    dropped from their tier, so that the next request loads them again."""
    problems = check_memory(store)
    for digest in [d for d in store.device if any(line.startswith(f"adapter {d},") for line in problems)]:
        store.discard(digest)
    for host in list(store.hosts.complete()):
        if host.unwanted and any(line.startswith(f"host adapter {host.digest},") for line in problems):
            store.hosts.forget(host)
    return problems


def _owners(tier: str, pool: Pool, owned: dict[str, list[list[int]]]) -> list[str]:
    expected: dict[int, str] = {}
    problems: list[str] = []
    for digest, runs in owned.items():
        for page in (page for run in runs for page in run):
            if page in expected:
                problems.append(f"{tier}: page {page} belongs to {expected[page]} and to {digest}")
            expected[page] = digest
    for page, owner in enumerate(pool.pages.owner):
        if expected.get(page) != owner:
            problems.append(f"{tier}: page {page} is booked for {owner} and held by {expected.get(page)}")
    return problems


@dataclass(frozen=True)
class _Entry:
    """Expected entry of one adapter in one table."""

    name: str
    slot: int
    run: int
    layout: AdapterLayout
    pages: list[int]


def _host_entry(host: HostAdapter) -> _Entry:
    assert host.layout is not None and host.pages is not None  # an adapter with pages has a layout
    return _Entry(f"host adapter {host.digest}", host.slot, host.run, host.layout, host.pages)


def _check_table(table: AdapterTable, what: str, entries: list[_Entry]) -> list[str]:
    rank = table.rank.cpu().numpy()
    slots = {entry.slot for entry in entries}
    problems = [
        f"{what} {slot} is no adapter's and its ranks are not 0"
        for slot in np.flatnonzero(rank.any(axis=(1, 2))).tolist()
        if slot not in slots
    ]
    if len(slots) < len(entries):
        problems.append(f"two adapters have the same {what}")
    for entry in entries:
        problems += _check_adapter(table, entry, rank[entry.slot])
    return problems


def _check_adapter(table: AdapterTable, entry: _Entry, rank: np.ndarray) -> list[str]:
    """Returns a line with adapter, layer and projection for each wrong entry of the table."""
    layout = entry.layout
    positions = layout.positions(entry.pages)
    scale, first = table.scale[entry.slot].cpu().numpy(), table.first[entry.slot].cpu().numpy()
    offsets = table.row_offset[entry.run : entry.run + layout.rows].cpu().numpy()
    wrong_row = offsets != positions
    problems: list[str] = []
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
            problems.append(f"{entry.name}, layer {layer}, projection {PROJECTIONS[projection]}: wrong {wrong}")
    return problems
