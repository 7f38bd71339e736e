"""Eviction policies of nodes, replayed on real arrivals, against LRU and a bound.

An adapter that is called and not in a pool is loaded at once; others are evicted for it in the policy's order. Calls
take no time, so nothing is leased. Constants of the policies were tuned on half of the functions and clients; figures
are of the other half.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import inf
from statistics import median
from typing import Any, Protocol

import numpy as np

from benchmarks.adapter_memory.eviction_bounds import Belady, min_miss_share
from benchmarks.adapter_memory.eviction_traces import HELD_OUT, SERVEGEN_KEPT, TUNED, Trace, traces
from benchmarks.adapter_memory.memory import RANKS
from benchmarks.common.report import arguments, publish, report
from node_agent.adapter_memory.demand import FORECAST_S, Demand
from node_agent.adapter_memory.eviction import POLICIES, Candidate
from node_agent.adapter_memory.host import REPEATED_SHARE
from node_agent.adapter_memory.load_rates import LoadRates

POOLS = (0.1, 1 / 3)
HOST_POOL = 1 / 3
"""host pool of a node with two tiers, whose device has POOLS[0]"""
TOLD_EVERY_S = 5.0
KNOWN = (0.02, 0.98)
"""Forecasts of the oracle: no call within FORECAST_S, or one."""
RESIDENTS = 2_000


class Policy(Protocol):
    def order(self, candidates: Sequence[Candidate], now: float) -> list[str]: ...
    def record_call(self, digest: str) -> None: ...
    def record_eviction(self, digest: str) -> None: ...


class Pool:
    """The pages of one tier, and the adapters that have them."""

    def __init__(self, trace: Trace, share: float, policy: Policy, reload_s: Callable[[str], float]) -> None:
        self.pages = dict(zip(map(str, range(len(trace.pages))), trace.pages, strict=True))
        self.free = self.total = max(int(sum(trace.pages) * share), max(trace.pages))
        self.policy, self.reload_s = policy, reload_s
        self.residents: OrderedDict[str, float] = OrderedDict()
        """Time of arrival by digest, the least recently used first."""

    def load(self, digest: str, now: float) -> bool:
        """Returns False if the adapter is there; else it is brought in, and others leave for it."""
        if digest in self.residents:
            self.residents.move_to_end(digest)
            return False
        self.make_room(self.pages[digest], now)
        self.residents[digest] = now
        self.free -= self.pages[digest]
        return True

    def make_room(self, pages: int, now: float, may_go: Callable[[str], bool] = lambda _: True) -> bool:
        """Returns False, and nobody leaves, where all that may go are too few."""
        if self.free >= pages:
            return True
        leaving = [(d, at) for d, at in self.residents.items() if may_go(d)]
        if self.free + sum(self.pages[digest] for digest, _ in leaving) < pages:
            return False
        candidates = [Candidate(d, self.pages[d], self.reload_s(d), at) for d, at in leaving]
        for victim in self.policy.order(candidates, now):
            self.policy.record_eviction(victim)
            del self.residents[victim]
            self.free += self.pages[victim]
            if self.free >= pages:
                break
        return True


class Forecasts:
    """An oracle's, or those of the oracle for another adapter each."""

    def __init__(self, trace: Trace, demand: Demand, *, right: bool) -> None:
        names = np.arange(len(trace.sizes))
        digests = names if right else np.roll(names, 1)
        self._calls = {str(digests[i]): [*trace.at[trace.adapter == i].tolist(), inf] for i in names}
        self._demand, self._updated_at = demand, -inf

    def update(self, now: float) -> None:
        """Gives the demand new forecasts, unless the last ones are younger than TOLD_EVERY_S."""
        if now - self._updated_at >= TOLD_EVERY_S:
            self._updated_at = now
            upcoming = {digest: at[bisect_right(at, now)] for digest, at in self._calls.items()}
            self._demand.expect({digest: KNOWN[at <= now + FORECAST_S] for digest, at in upcoming.items()})


def miss_share(trace: Trace, share: float, make: Callable[[Demand], Policy], right: bool | None = None) -> float:
    """Returns the share of called bytes that were not in the pool. `right`: whether the forecasts are; None: there
    are none."""
    demand, rates = Demand(), LoadRates()
    pool = Pool(trace, share, make(demand), lambda d: rates.seconds("host", trace.sizes[int(d)]))
    forecasts = None if right is None else Forecasts(trace, demand, right=right)
    missed = 0
    for now, adapter in zip(trace.at.tolist(), trace.adapter.tolist(), strict=True):
        digest = str(adapter)
        if forecasts is not None and digest not in pool.residents:
            forecasts.update(now)
        missed += pool.load(digest, now) * trace.sizes[adapter]
        demand.record_call(digest, now)
        pool.policy.record_call(digest)
    return missed / float(np.array(trace.sizes)[trace.adapter].sum())


def reload_seconds(trace: Trace, name: str) -> float:
    """Returns what loads took in all on a node of two tiers, at the first rates of LoadRates, as DeviceRoom and
    HostTier count them."""
    demand, rates = Demand(), LoadRates()
    store = [rates.seconds("absent", size) for size in trace.sizes]
    link = [rates.seconds("host", size) for size in trace.sizes]

    def of_host(digest: str) -> float:
        return store[int(digest)] * (REPEATED_SHARE if digest in device.residents else 1.0)

    def of_device(digest: str) -> float:
        return link[int(digest)] + (0.0 if digest in host.residents else store[int(digest)])

    device = Pool(trace, POOLS[0], POLICIES[name](demand), of_device)
    host = Pool(trace, HOST_POOL, POLICIES[name](demand), of_host)
    total = 0.0
    for now, adapter in zip(trace.at.tolist(), trace.adapter.tolist(), strict=True):
        digest = str(adapter)
        if digest not in device.residents and host.load(digest, now):
            total += store[adapter]
        total += device.load(digest, now) * link[adapter]
        demand.record_call(digest, now)
        for pool in (device, host):
            pool.policy.record_call(digest)
    return total


def rows_of(half: list[Trace]) -> list[dict[str, Any]]:
    """A row per trace and pool: the miss share of every policy, of `cost` with forecasts, of Belady, and the bound; and
    reload seconds where the pool is the device of a node."""
    rows: list[dict[str, Any]] = []
    for trace in half:
        for share in POOLS:
            row: dict[str, Any] = {
                "trace": trace.name, "held_out": trace.half == HELD_OUT, "calls": len(trace.at),
                "adapters": len(trace.sizes), "pool_share": round(share, 3),
            }  # fmt: skip
            row |= {f"miss_{name}": miss_share(trace, share, policy) for name, policy in POLICIES.items()}
            for kind, right in (("oracle", True), ("wrong", False)):
                row[f"miss_cost_{kind}"] = miss_share(trace, share, POLICIES["cost"], right)
            row["miss_belady"] = miss_share(trace, share, lambda _, trace=trace: Belady(trace))  # type: ignore[misc]
            pool = max(int(sum(trace.pages) * share), max(trace.pages))
            row["miss_bound"] = min_miss_share(trace, pool)
            if share == POOLS[0]:
                row |= {f"reload_s_{name}": reload_seconds(trace, name) for name in POLICIES}
            rows.append(row)
    return rows


def gap_closed(rows: Iterable[dict[str, Any]], policy: str, bound: str) -> float:
    """Returns the share of LRU's excess misses, in bytes over those of the bound, that the policy avoids.

    Each trace and pool has the same weight.
    """
    lru, best, mine = (sum(row[f"miss_{name}"] for row in rows) for name in ("lru", bound, policy))
    return float((lru - mine) / (lru - best))


def figures_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Returns the figures of the held-out half, and `tuned_gap_closed_cost` of the other."""
    reported = [row for row in rows if row["held_out"]]
    nodes = [row for row in reported if "reload_s_lru" in row]
    figures: dict[str, float] = {}
    for name in (*POLICIES, "cost_oracle", "cost_wrong"):
        figures[f"miss_share_{name}"] = sum(row[f"miss_{name}"] for row in reported) / len(reported)
        figures[f"gap_closed_{name}"] = gap_closed(reported, name, "belady")
        figures[f"bound_gap_closed_{name}"] = gap_closed(reported, name, "bound")
        figures[f"worst_over_lru_{name}"] = max(row[f"miss_{name}"] / row["miss_lru"] for row in reported)
    for name in POLICIES:
        figures[f"reload_over_lru_{name}"] = median(row[f"reload_s_{name}"] / row["reload_s_lru"] for row in nodes)
        figures[f"reload_worst_over_lru_{name}"] = max(row[f"reload_s_{name}"] / row["reload_s_lru"] for row in nodes)
    for name in ("belady", "bound"):
        figures[f"miss_share_{name}"] = sum(row[f"miss_{name}"] for row in reported) / len(reported)
    tuned = [row for row in rows if not row["held_out"]]
    return figures | ({"tuned_gap_closed_cost": gap_closed(tuned, "cost", "belady")} if tuned else {})


def order_ms(seed: int) -> float:
    """Returns how long `cost` takes to order RESIDENTS adapters, half of them forecast; the median of 51."""
    rng = np.random.default_rng(seed)
    demand = Demand()
    for at, adapter in enumerate(rng.integers(RESIDENTS, size=4 * RESIDENTS).tolist()):
        demand.record_call(str(adapter), float(at))
    demand.expect({str(i): float(rng.random()) for i in range(0, RESIDENTS, 2)})
    candidates = [Candidate(str(i), 7 + i % 100, 0.1, float(i)) for i in range(RESIDENTS)]
    order = partial(POLICIES["cost"](demand).order, candidates, 4.0 * RESIDENTS)
    took = []
    for _ in range(51):
        begin = time.perf_counter()
        order()
        took.append(time.perf_counter() - begin)
    return median(took) * 1e3


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    if options.quick:
        rows = rows_of(traces(HELD_OUT, options.seed)[:1])
    else:
        rows = [row for half in (TUNED, HELD_OUT) for row in rows_of(traces(half, options.seed))]
    figures = figures_of(rows) | {"order_ms": order_ms(options.seed)}
    settings = {
        "base": "llama-7b", "ranks": list(RANKS), "projections": "q, k, v", "pools": [round(p, 3) for p in POOLS],
        "host_pool": round(HOST_POOL, 3), "servegen_kept": SERVEGEN_KEPT, "residents": RESIDENTS,
        "host_bytes_per_s": LoadRates().bytes_per_s["host"], "store_bytes_per_s": LoadRates().bytes_per_s["absent"],
    }  # fmt: skip
    publish(report("eviction", settings, options.seed, rows, figures, simulated=True), options.json)


if __name__ == "__main__":
    main()
