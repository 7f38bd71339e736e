"""Which adapters leave memory: the score, the policies beside references of their own, and what stays whatever they
say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import exp, inf, log
from typing import get_args, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from garnish.service_file import Node
from node_agent.adapter_memory import demand as demand_module
from node_agent.adapter_memory.demand import FORECAST_S, FORECAST_WEIGHT, LONG_S, RARELY, RECENT_S, SURELY, Demand
from node_agent.adapter_memory.eviction import HYSTERESIS, POLICIES, SETTLES_S, Candidate
from node_agent.adapter_memory.host import REPEATED_SHARE
from node_agent.adapter_memory.integrity import check_memory
from node_agent.adapter_memory.load_rates import FIRST_RATES, LoadRates
from node_agent.adapter_memory.loads import HostAdapter
from node_agent.adapter_memory.store import AdapterStore
from node_agent.config import EngineConfig
from node_agent.leases import Lease
from tests.node_agent.adapter_world import World, loaded_lease, measured, until
from tests.support.draws import draws

NAMES = "abcdefgh"
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), st.floats(0, 400)), max_size=40)
"""Name and seconds since the call before."""
CANDIDATES = st.lists(
    st.builds(
        Candidate,
        digest=st.sampled_from(NAMES),
        pages=st.integers(1, 200),
        reload_s=st.floats(1e-4, 100),
        arrived=st.floats(8e4, 1e5),
        awaited=st.booleans(),
    ),
    unique_by=lambda each: each.digest,
)


def rate(calls: list[float], chance: float | None, since: float, now: float) -> float:
    """The formula, summed over all calls."""
    calls = calls or [since]
    own = [sum(exp(-(now - at) / window) for at in calls) / window for window in (RECENT_S, LONG_S)]
    found = (own[0] * own[1]) ** 0.5
    if chance is None:
        return found
    forecast = -log(1 - min(max(chance, RARELY), SURELY)) / FORECAST_S
    if chance >= SURELY:
        forecast = max(forecast, found)
    return found ** (1 - FORECAST_WEIGHT) * forecast**FORECAST_WEIGHT


@given(
    calls=CALLS,
    chances=st.dictionaries(st.sampled_from(NAMES), st.floats(0, 1)),
    candidates=CANDIDATES,
    later=st.floats(0, 1000),
)
def test_the_score_is_the_formula(
    calls: list[tuple[str, float]], chances: dict[str, float], candidates: list[Candidate], later: float
) -> None:
    demand, now = Demand(), 1e5
    history: dict[str, list[float]] = {name: [] for name in NAMES}
    for name, gap in calls:
        now += gap
        demand.record_call(name, now)
        history[name].append(now)
    demand.expect(dict.fromkeys(NAMES, 1.0))  # replaced by the next
    demand.expect(chances)
    now += later
    policy = POLICIES["cost"](demand)
    expected = {}
    for each in candidates:
        saved = rate(history[each.digest], chances.get(each.digest), each.arrived, now) * each.reload_s / each.pages
        expected[each.digest] = saved * (1 + HYSTERESIS * (now - each.arrived < SETTLES_S))
        assert policy.score(each, now) == pytest.approx(log(expected[each.digest]), abs=1e-6)
    order = policy.order(candidates, now)
    assert sorted(order) == sorted(each.digest for each in candidates)
    awaited = {each.digest for each in candidates if each.awaited}
    assert set(order[len(order) - len(awaited) :]) == awaited
    values = [expected[digest] for digest in order if digest not in awaited]
    assert all(a <= b * (1 + 1e-6) for a, b in pairwise(values))


def test_calls_of_only_so_many_adapters_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand_module, "MAX_REMEMBERED", 2)
    demand = Demand()
    for at, name in enumerate("abcab"):  # c goes for a, and a for b
        demand.record_call(name, float(at))
    assert [demand.calls(name) for name in "abc"] == [1, 1, 0]
    assert len(demand._levels) == len(demand._calls) == 2


@pytest.mark.parametrize("chance", [-0.01, 1.01, float("nan"), inf])
def test_a_forecast_that_is_no_probability_is_refused(chance: float) -> None:
    demand = Demand()
    with pytest.raises(ValueError, match=r"adapter a is .*: expected 0 to 1"):
        demand.expect({"a": chance})


def test_an_adapter_that_has_just_come_stays_among_equals() -> None:
    """Also for one a little better, not for one much better, and no longer than SETTLES_S."""
    demand = Demand()
    policy = POLICIES["cost"](demand)
    for name in "ab":
        demand.record_call(name, 0.0)
    now = 1000.0

    def leaves(better: float, ago: float) -> str:
        new = Candidate("a", 10, 1.0, now - ago)
        return policy.order([new, Candidate("b", 10, better, 0.0)], now)[0]

    assert leaves(1.0, 1.0) == leaves(1 + HYSTERESIS * 0.9, 1.0) == "b"
    assert leaves(1 + HYSTERESIS * 1.1, 1.0) == "a"
    assert leaves(1 + HYSTERESIS * 0.9, SETTLES_S + 1) == "a"


@pytest.mark.parametrize("name", ["cost", "lru"])
def test_adapters_called_once_do_not_displace_one_in_use(name: str) -> None:
    """One is called each minute for an hour; beside it another one each second, never again. By cost the first stays
    from its second call on; LRU lets it go each time."""
    demand = Demand()
    policy = POLICIES[name](demand)
    here: dict[str, float] = {}
    loads = 0
    for now in range(3600):
        for called in ["steady"] * (now % 60 == 0) + [f"once-{now}"]:
            if called not in here and len(here) == 20:
                candidates = [Candidate(each, 10, 1.0, at) for each, at in here.items()]
                del here[policy.order(candidates, now)[0]]
            loads += called == "steady" and called not in here
            here[called] = here.pop(called, float(now))
            demand.record_call(called, now)
    assert loads == (2 if name == "cost" else 60)


class Reference:
    """A cache of `pages`, straight from the definitions: lru by a list, lfu by all calls, gdsf by priorities."""

    def __init__(self, name: str, pages: int, sizes: dict[str, int], costs: dict[str, float]) -> None:
        self.name, self.pages, self.sizes, self.costs = name, pages, sizes, costs
        self.here: list[str] = []
        """least recently used first"""
        self.ever: dict[str, int] = {}
        self.uses: dict[str, int] = {}
        self.priority: dict[str, float] = {}
        self.inflation = 0.0

    def call(self, name: str) -> list[str]:
        """Returns who left."""
        gone = []
        if name not in self.here:
            while sum(self.sizes[each] for each in self.here) + self.sizes[name] > self.pages:
                gone.append(self._leave())
            self.uses[name] = 0
        else:
            self.here.remove(name)
        self.here.append(name)
        self.ever[name] = self.ever.get(name, 0) + 1
        self.uses[name] += 1
        self.priority[name] = self.inflation + self.uses[name] * self.costs[name] / self.sizes[name]
        return gone

    def _leave(self) -> str:
        key: Callable[[str], float] = {
            "lru": lambda _: 0.0,
            "lfu": lambda each: self.ever[each],
            "gdsf": lambda each: self.priority[each],
        }[self.name]
        victim = min(self.here, key=key)  # the first of equals
        self.inflation = max(self.inflation, self.priority[victim])
        self.here.remove(victim)
        return victim


@pytest.mark.parametrize("name", ["lru", "lfu", "gdsf"])
@settings(max_examples=draws(60))
@given(
    calls=st.lists(st.sampled_from(NAMES), max_size=80),
    sizes=st.lists(st.integers(1, 9), min_size=len(NAMES), max_size=len(NAMES)),
    costs=st.lists(st.integers(1, 50).map(float), min_size=len(NAMES), max_size=len(NAMES)),
    pages=st.integers(9, 20),
)
def test_alternatives_are_what_their_names_say(
    name: str, calls: list[str], sizes: list[int], costs: list[float], pages: int
) -> None:
    size, cost = dict(zip(NAMES, sizes, strict=True)), dict(zip(NAMES, costs, strict=True))
    reference = Reference(name, pages, size, cost)
    demand = Demand()
    policy = POLICIES[name](demand)
    here: list[str] = []
    left = 0
    for now, called in enumerate(calls):
        gone = []
        order = iter(policy.order([Candidate(each, size[each], cost[each], 0.0) for each in here], now))
        while called not in here and sum(size[each] for each in here) + size[called] > pages:
            gone.append(next(order))
            policy.record_eviction(gone[-1])
            here.remove(gone[-1])
        here = [*(each for each in here if each != called), called]
        demand.record_call(called, now)
        policy.record_call(called)
        assert gone == reference.call(called)
        left += len(gone)
    assert policy.evictions == left


def test_the_setting_knows_every_policy() -> None:
    assert get_args(get_type_hints(Node)["eviction"]) == tuple(POLICIES)
    assert Node().eviction == EngineConfig(model_dir="", base_id="", registry="").eviction == "cost"


# --- in the store


@pytest.mark.parametrize("eviction", POLICIES)
@settings(max_examples=draws(8), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_only_idle_adapters_can_leave(world: World, eviction: str, data: st.DataObject) -> None:
    """Drawn loads, a lease and a worker's hold that stay, pins and forecasts, over two slots of the device and a host
    tier for the two largest."""
    large = [adapter for adapter in world.adapters if adapter.bytes > 64 << 10]
    store = world.store(eviction=eviction, adapter_slots=2, host_memory=512 << 10)
    _check_candidates(store)
    held: list[Lease] = []
    hold: HostAdapter | None = None
    try:
        for adapter in data.draw(st.lists(st.sampled_from(large), min_size=6, max_size=14)):
            store.room.pinned = {data.draw(st.sampled_from(sorted(store.device)))} if len(store.device) == 2 else set()
            store.expect({adapter.digest: data.draw(st.floats(0, 1))})
            found = measured(store, adapter)
            if isinstance(found, Lease):
                held.append(found)
                until(store, lambda lease=found: store.loaded(lease))  # type: ignore[misc]
                if hold is None:
                    hold = store.hold_host(found)
            if len(held) > data.draw(st.integers(0, 1)):
                store.release(held.pop(data.draw(st.integers(0, len(held) - 1))), [])
            if hold is not None and data.draw(st.integers(0, 3)) == 0:
                store.release_host(hold)
                hold = None
            assert all(lease.digest in store.device for lease in held)
            assert not check_memory(store)
        for lease in held:
            store.release(lease, [])
    finally:
        store.close()


def _check_candidates(store: AdapterStore) -> None:
    """Each tier's policy fails when it is asked about an adapter that must stay."""
    room, hosts = store.room, store.hosts
    order_device, order_host = room.eviction.order, hosts.eviction.order

    def on_device(candidates: Sequence[Candidate], now: float) -> list[str]:
        for each in candidates:
            entry = room.adapters[each.digest]
            assert entry.leases == 0 and entry.settled and entry.copy.ended
            assert each.digest not in room.pinned and each.pages == len(entry.pages)
        return order_device(candidates, now)

    def on_host(candidates: Sequence[Candidate], now: float) -> list[str]:
        for each in candidates:
            host = hosts.get(each.digest)
            assert host is not None and host.complete and not (host.copying or host.holds or hosts.waiting(each.digest))
            assert each.pages == len(host.pages or ())
        return order_host(candidates, now)

    room.eviction.order = on_device  # type: ignore[method-assign]
    hosts.eviction.order = on_host  # type: ignore[method-assign]


def test_the_setting_decides_who_leaves(world: World, make_store: Callable[..., AdapterStore]) -> None:
    """The first is called twice, the second last: lru evicts the first, lfu the second."""
    for eviction, leaves in (("lru", 0), ("lfu", 1)):
        store = make_store(adapter_slots=2, eviction=eviction)
        for i in (0, 0, 1, 2):
            store.release(loaded_lease(store, world.adapters[i]), [])
        assert set(store.device) == {world.adapters[i].digest for i in (0, 1, 2) if i != leaves}
        assert (store.room.eviction.evictions, store.hosts.eviction.evictions) == (1, 0)


def test_the_forecast_decides_between_equals(world: World, make_store: Callable[..., AdapterStore]) -> None:
    for likely in (0, 1):
        store = make_store(adapter_slots=2)
        for i in (0, 1):
            store.release(loaded_lease(store, world.adapters[i]), [])
        store.expect({world.adapters[i].digest: 0.98 if i == likely else 0.0 for i in (0, 1)})
        store.release(loaded_lease(store, world.adapters[2]), [])
        assert set(store.device) == {world.adapters[i].digest for i in (likely, 2)}


def test_an_awaited_adapter_stays(world: World, make_store: Callable[..., AdapterStore]) -> None:
    store = make_store(adapter_slots=2, eviction="lru")
    for i in (0, 1):
        store.release(loaded_lease(store, world.adapters[i]), [])
    store.announce(world.adapters[0])
    store.release(loaded_lease(store, world.adapters[2]), [])
    assert set(store.device) == {world.adapters[i].digest for i in (0, 2)}
    store.retract(world.adapters[0].digest)


def test_what_bringing_back_costs(world: World, make_store: Callable[..., AdapterStore]) -> None:
    """From host memory over the link alone; else from the store too. A copy below the device counts a share."""
    store = make_store()
    adapter = world.adapters[0]
    store.release(loaded_lease(store, adapter), [])
    entry, host = store.device[adapter.digest], store.hosts.get(adapter.digest)
    assert host is not None
    rates = store.hosts.rates
    rates.bytes_per_s = {"host": 1000.0, "disk": 100.0, "absent": 10.0}
    assert store.room._candidate(entry).reload_s == pytest.approx(entry.size / 1000)
    assert store.hosts._candidate(host).reload_s == pytest.approx(REPEATED_SHARE * host.size / 10)
    store.hosts.forget(host)
    assert store.room._candidate(entry).reload_s == pytest.approx(entry.size / 1000 + entry.size / 10)
    store.release(loaded_lease(store, world.adapters[1]), [])
    second = store.hosts.get(world.adapters[1].digest)
    assert second is not None and store.discard(second.digest)
    assert store.hosts._candidate(second).reload_s == pytest.approx(rates.seconds("absent", second.size))


def test_rates_are_of_the_latest_loads(world: World, make_store: Callable[..., AdapterStore]) -> None:
    rates = LoadRates()
    for _ in range(40):
        rates.record_load("absent", 10**8, 2.0)
    rates.record_load("absent", 0, 1.0)
    rates.record_load("disk", 10, 0.0)
    assert rates.seconds("absent", 10**8) == pytest.approx(2.0, rel=0.05)
    assert rates.bytes_per_s["disk"] == FIRST_RATES["disk"]
    store = make_store()
    first = loaded_lease(store, world.adapters[0])
    assert store.hosts.rates.bytes_per_s["absent"] != FIRST_RATES["absent"]
    store.release(first, [])
    assert store.discard(first.digest)
    before = dict(store.hosts.rates.bytes_per_s)
    store.release(loaded_lease(store, world.adapters[0]), [])
    after = store.hosts.rates.bytes_per_s
    assert {tier for tier in before if before[tier] != after[tier]} == {"host"}, "nothing else was read"
