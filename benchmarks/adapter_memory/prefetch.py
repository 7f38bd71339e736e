"""Hit rates with predicted prefetch on real arrivals: by the gateways' forecasts, none, an oracle's, and worthless
ones.

A node of two tiers, its eviction by cost. Each second the forecaster learns from the calls; every PLAN_SECONDS the
adapters that the leader would ask the node for are brought in, within the bounds of both (NodeWants, PrefetchRecord,
Demand), in the time that calls have left to store and link. Calls take no time, so nothing is leased. `oracle` knows
the next call of every function and says so as a chance that falls with the time until then; `worthless` gets
for each function the forecast of another. A call that comes before its adapter's loads are over counts as if they were.
The functions and clients are those on which nothing was tuned.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import exp, inf
from statistics import median
from typing import Any

import numpy as np

from benchmarks.adapter_memory.eviction import HOST_POOL, POOLS, Pool
from benchmarks.adapter_memory.eviction_traces import HELD_OUT, Trace, traces
from benchmarks.common.report import arguments, publish, report
from cluster.forecast.forecaster import Forecaster
from cluster.messages import Adapter
from cluster.residency import WantedAdapter
from garnish import service_file
from gateway.residency.history import MAX_CHOSEN, MIN_CHANCE
from gateway.residency.messages import WATCH_SECONDS, Tier
from gateway.residency.plan import DEVICE_CHANCE, NodeMemory, NodeWants, PrewarmTarget
from gateway.residency.residency import PLAN_SECONDS
from node_agent.adapter_memory.demand import FORECAST_S, Demand
from node_agent.adapter_memory.eviction import POLICIES
from node_agent.adapter_memory.host import REPEATED_SHARE
from node_agent.adapter_memory.load_rates import LoadRates
from node_agent.engine.prefetch_record import PrefetchRecord
from node_agent.engine.prefetcher import HYSTERESIS, LEEWAY, UNUSED_S

ORACLE_S = 10.0
"""The oracle's chance of a call in t seconds is exp(-t / ORACLE_S)."""
VARIANTS = ("off", "auto", "oracle", "worthless")

Likely = Sequence[tuple[str, float]]


def forecasts_of(trace: Trace) -> dict[int, Likely]:
    """Returns what the forecaster says at each plan, by its second. It learns from the calls before."""
    forecaster, by_second, begin = Forecaster(), dict[int, Likely](), int(trace.at[0])
    seconds, counts = np.floor(trace.at).astype(int), dict[int, Counter[str]]()
    for second, adapter in zip(seconds.tolist(), trace.adapter.tolist(), strict=True):
        counts.setdefault(second, Counter())[str(adapter)] += 1
    for now in range(begin + 1, int(trace.at[-1]) + 1):
        forecaster.observe(float(now), counts.get(now - 1, {}))
        if now - begin >= WATCH_SECONDS and now % PLAN_SECONDS == 0:
            by_second[now] = forecaster.forecast(float(now)).likeliest(MIN_CHANCE, MAX_CHOSEN)
    return by_second


def oracle_of(trace: Trace) -> Callable[[int], Likely]:
    calls = {str(i): [*trace.at[trace.adapter == i].tolist(), inf] for i in range(len(trace.sizes))}

    def likely(now: int) -> Likely:
        nexts = [(at[bisect_right(at, now)] - now, digest) for digest, at in calls.items()]
        return [(digest, exp(-wait_s / ORACLE_S)) for wait_s, digest in sorted(nexts) if wait_s <= FORECAST_S]

    return likely


@dataclass
class Node:
    """`waste`: as `node.prefetch_waste`."""

    trace: Trace
    waste: float
    prefetched: dict[str, float] = field(default_factory=dict)
    """Time of prefetch by digest, of adapters that were not called yet."""
    wants: Sequence[WantedAdapter] = ()
    calls_by_tier: Counter[str] = field(default_factory=Counter)
    waits_s: float = 0.0
    """Seconds that all calls waited for their adapters."""

    def __post_init__(self) -> None:
        self.demand, rates, sizes = Demand(), LoadRates(), self.trace.sizes
        self.store_s = [rates.seconds("absent", size) for size in sizes]
        self.link_s = [rates.seconds("host", size) for size in sizes]
        cost = POLICIES["cost"]
        self.device = Pool(self.trace, POOLS[0], cost(self.demand), self._back_to_device)
        self.host = Pool(self.trace, HOST_POOL, cost(self.demand), self._back_to_host)
        device_bytes = round(sum(sizes) * POOLS[0])
        self.room: dict[Tier, int] = {"device": device_bytes, "host": round(sum(sizes) * HOST_POOL)}
        self.record = PrefetchRecord(self.waste, device_bytes // LEEWAY)
        self._busy = {"store": 0.0, "link": 0.0}
        """Seconds that calls had store and link load since the last plan."""

    def call(self, adapter: int, now: float) -> None:
        digest = str(adapter)
        tier = "device" if digest in self.device.residents else "host" if digest in self.host.residents else "absent"
        self.calls_by_tier[tier] += 1
        if digest in self.prefetched:
            del self.prefetched[digest]
            self.record.count_bytes(now, useful=self.trace.sizes[adapter])
        if tier == "absent":
            self.host.load(digest, now)
            self._busy["store"] += self.store_s[adapter]
        if self.device.load(digest, now):
            self._busy["link"] += self.link_s[adapter]
        self.waits_s += (tier == "absent") * self.store_s[adapter] + (tier != "device") * self.link_s[adapter]
        self.demand.record_call(digest, now)
        for pool in (self.device, self.host):
            pool.policy.record_call(digest)

    def plan(self, likely: Likely, now: float) -> None:
        """The leader asks for what is likely, and the node brings it in where store and link had nothing else to do."""
        self.wants = self._requests(likely)
        self.demand.expect({want.adapter.digest: want.chance for want in self.wants})
        idle = {link: PLAN_SECONDS - busy for link, busy in self._busy.items()}
        self._busy = dict.fromkeys(self._busy, 0.0)
        bounds = self.record.bounds(now)
        for want in self.wants:
            if want.chance >= bounds.min_chance:
                self._bring(want, now, idle)
        self._judge(now)

    def _requests(self, likely: Likely) -> list[WantedAdapter]:
        requests = NodeWants(NodeMemory({"device": self.room["device"], "host": self.room["host"]}))
        for digest, chance in likely:
            near = digest in self.device.residents or digest in self.host.residents
            adapter = Adapter(digest, "", self.trace.sizes[int(digest)], (1,))
            wish = PrewarmTarget(digest, adapter, "forecast", chance)
            requests.take(wish, "device" if near or chance >= DEVICE_CHANCE else "host")
        return [want.message() for want in requests.wants.values()]

    def _bring(self, want: WantedAdapter, now: float, idle: dict[str, float]) -> None:
        digest, adapter = want.adapter.digest, int(want.adapter.digest)
        if digest in self.device.residents:
            return
        if digest not in self.host.residents:
            if idle["store"] <= 0 or not self._make_room(self.host, want, now):
                return
            self.host.load(digest, now)
            idle["store"] -= self.store_s[adapter]
            self.prefetched[digest] = now
        if want.tier == "device" and idle["link"] > 0 and self._make_room(self.device, want, now):
            self.device.load(digest, now)
            idle["link"] -= self.link_s[adapter]
            self.prefetched[digest] = now

    def _make_room(self, pool: Pool, want: WantedAdapter, now: float) -> bool:
        """Evicts adapters that are less likely to be called. Returns False, evicting nothing, if they are too few."""
        chances = {each.adapter.digest: each.chance for each in self.wants}

        def may_go(digest: str) -> bool:
            chance = chances[digest] if digest in chances else self.demand.chance(digest, now)
            return chance * HYSTERESIS <= want.chance

        return pool.make_room(pool.pages[want.adapter.digest], now, may_go)

    def _judge(self, now: float) -> None:
        requested = {want.adapter.digest for want in self.wants}
        for digest, at in list(self.prefetched.items()):
            here = digest in self.host.residents or digest in self.device.residents
            if not here or (digest not in requested and now - at >= UNUSED_S):
                del self.prefetched[digest]
                self.record.count_bytes(now, wasted=self.trace.sizes[int(digest)])

    def _back_to_device(self, digest: str) -> float:
        return self.link_s[int(digest)] + (0.0 if digest in self.host.residents else self.store_s[int(digest)])

    def _back_to_host(self, digest: str) -> float:
        return self.store_s[int(digest)] * (REPEATED_SHARE if digest in self.device.residents else 1.0)


def replay(trace: Trace, likely: Callable[[int], Likely] | None, waste: float) -> Node:
    """`likely`: what is forecast at a second; None: nothing is prefetched."""
    node, second = Node(trace, waste), int(trace.at[0])
    for at, adapter in zip(trace.at.tolist(), trace.adapter.tolist(), strict=True):
        while likely is not None and second + 1 <= at:
            second += 1
            if second % PLAN_SECONDS == 0:
                node.plan(likely(second), float(second))
        node.call(adapter, at)
    return node


def row_of(trace: Trace, waste: float) -> dict[str, Any]:
    forecasts = forecasts_of(trace)
    names = len(trace.sizes)
    sources: dict[str, Callable[[int], Likely] | None] = {
        "off": None,
        "auto": lambda now: forecasts.get(now, ()),
        "oracle": oracle_of(trace),
        "worthless": lambda now: [(str((int(d) + names // 2) % names), chance) for d, chance in forecasts.get(now, ())],
    }
    row: dict[str, Any] = {"trace": trace.name, "calls": len(trace.at), "adapters": names}
    for name, likely in sources.items():
        node = replay(trace, likely, waste)
        row |= {
            f"{tier}_share_{name}": node.calls_by_tier[tier] / len(trace.at) for tier in ("device", "host", "absent")
        }
        row[f"wait_ms_{name}"] = node.waits_s / len(trace.at) * 1e3
        row |= {f"{kind}_bytes_{name}": getattr(node.record, f"{kind}_bytes") for kind in ("useful", "wasted")}
    return row


def figures_of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Returns ratios to no prefetch: the median over the traces, and the worst."""
    figures: dict[str, float] = {}
    for name in VARIANTS[1:]:
        for figure in ("wait_ms", "absent_share"):
            ratios = [row[f"{figure}_{name}"] / row[f"{figure}_off"] for row in rows]
            figures[f"{figure}_{name}"], figures[f"{figure}_worst_{name}"] = median(ratios), max(ratios)
        misses = [(1 - row[f"device_share_{name}"]) / (1 - row["device_share_off"]) for row in rows]
        figures[f"misses_{name}"], figures[f"misses_worst_{name}"] = median(misses), max(misses)
        bytes_ = {kind: sum(row[f"{kind}_bytes_{name}"] for row in rows) for kind in ("useful", "wasted")}
        figures[f"wasted_{name}"] = bytes_["wasted"] / max(1, sum(bytes_.values()))
    return figures


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    waste = service_file.Node().prefetch_waste
    rows = [row_of(trace, waste) for trace in traces(HELD_OUT, options.seed)[: 1 if options.quick else None]]
    settings = {
        "base": "llama-7b", "projections": "q, k, v", "device_pool": POOLS[0], "host_pool": round(HOST_POOL, 3),
        "host_bytes_per_s": LoadRates().bytes_per_s["host"], "store_bytes_per_s": LoadRates().bytes_per_s["absent"],
        "plan_s": PLAN_SECONDS, "prefetch_waste": waste,
    }  # fmt: skip
    publish(report("prefetch", settings, options.seed, rows, figures_of(rows), simulated=True), options.json)


if __name__ == "__main__":
    main()
