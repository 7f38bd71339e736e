"""Virtual token counters: the paper's algorithm step by step, its bound, and that pauses bank nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.fair_shares import OUTPUT_PRICE, PROMPT_PRICE, Counters, FairShares, in_fair_order, token_cost

TENANTS = ("a", "b", "c", "d")
FUNCTIONS = ("", "f", "g")


@dataclass(eq=False)
class Call:
    tenant: str
    function: str
    prompt: int
    output: int
    first_token_deadline: float = 0.0
    made: int = 0


@dataclass
class Paper:
    """One level of VTC as in Algorithm 2 of the paper, with weights."""

    counters: dict[str, float] = field(default_factory=dict)
    queue: list[str] = field(default_factory=list)
    last: str | None = None

    def join(self, owner: str) -> None:
        known = self.counters.get(owner, 0.0)
        if owner not in self.queue:
            if self.queue:
                known = max(known, min(self.counters[other] for other in self.queue))
            elif self.last is not None:
                known = max(known, self.counters[self.last])
        self.counters[owner] = known
        self.queue.append(owner)

    def leave(self, owner: str) -> None:
        self.queue.remove(owner)
        self.last = owner


calls = st.builds(
    Call,
    tenant=st.sampled_from(TENANTS),
    function=st.sampled_from(FUNCTIONS),
    prompt=st.integers(1, 50),
    output=st.integers(1, 20),
    first_token_deadline=st.floats(0, 10),
)
events = st.lists(st.one_of(calls, st.sampled_from(["serve", "step", "cancel"])), max_size=80)


@given(events=events, weights=st.tuples(*[st.sampled_from([0.5, 1.0, 2.0, 7.0])] * len(TENANTS)))
def test_counters_are_those_of_the_paper(events: list[Call | str], weights: tuple[float, ...]) -> None:
    """At both levels, and who is next has the least of them, of equal ones what is first_token_deadline first."""
    weight = dict(zip(TENANTS, weights, strict=True))
    shares, tenants = FairShares(), Paper()
    functions = {tenant: Paper() for tenant in TENANTS}
    waiting: list[Call] = []
    running: list[Call] = []

    def charge(call: Call, prompt: int, output: int) -> None:
        service = prompt * PROMPT_PRICE + output * OUTPUT_PRICE
        shares.charge(call.tenant, call.function, weight[call.tenant], token_cost(prompt, output, 0))
        tenants.counters[call.tenant] += service / weight[call.tenant]
        functions[call.tenant].counters[call.function] += service

    def leave(call: Call) -> None:
        waiting.remove(call)
        shares.leave(call.tenant, call.function)
        tenants.leave(call.tenant)
        functions[call.tenant].leave(call.function)

    for event in events:
        if isinstance(event, Call):
            waiting.append(event)
            shares.join(event.tenant, event.function)
            tenants.join(event.tenant)
            functions[event.tenant].join(event.function)
        elif event == "serve" and waiting:
            chosen = next(in_fair_order(waiting, shares))
            least = min(tenants.counters[call.tenant] for call in waiting)
            assert tenants.counters[chosen.tenant] == least
            own = functions[chosen.tenant]
            mine = [call for call in waiting if call.tenant == chosen.tenant]
            assert own.counters[chosen.function] == min(own.counters[call.function] for call in mine)
            assert chosen.first_token_deadline == min(
                call.first_token_deadline for call in mine if call.function == chosen.function
            )
            charge(chosen, chosen.prompt, 0)
            leave(chosen)
            running.append(chosen)
        elif event == "step":
            for call in running:
                charge(call, 0, 1)
                call.made += 1
            running = [call for call in running if call.made < call.output]
        elif event == "cancel" and waiting:
            leave(waiting[len(waiting) // 2])
        for tenant in {call.tenant for call in waiting}:
            assert math.isclose(shares.tenant(tenant), tenants.counters[tenant])
            for function in {call.function for call in waiting if call.tenant == tenant}:
                assert math.isclose(shares.function(tenant, function), functions[tenant].counters[function])


@given(data=st.data(), rows=st.integers(1, 6), count=st.integers(2, 4))
def test_backlogged_tenants_get_service_by_weight(data: st.DataObject, rows: int, count: int) -> None:
    """The paper's theorem: |W_i/w_i - W_j/w_j| <= 2 max(prompt, output of a whole batch) / w, at any time."""
    longest, most = 40, 15
    weights = {tenant: data.draw(st.sampled_from([1.0, 2.0, 5.0])) for tenant in TENANTS[:count]}
    shapes = {tenant: data.draw(st.tuples(st.integers(1, longest), st.integers(1, most))) for tenant in weights}
    shares, served = FairShares(), dict.fromkeys(weights, 0.0)
    waiting = [Call(tenant, "", *shapes[tenant], first_token_deadline=turn) for tenant in weights for turn in range(3)]
    for call in waiting:
        shares.join(call.tenant, "")
    running: list[Call] = []
    bound = 2 * max(PROMPT_PRICE * longest, OUTPUT_PRICE * rows * most) / min(weights.values())

    def charge(call: Call, service: float) -> None:
        shares.charge(call.tenant, "", weights[call.tenant], service)
        served[call.tenant] += service / weights[call.tenant]

    for _ in range(300):
        while len(running) < rows:
            call = next(in_fair_order(waiting, shares))
            charge(call, token_cost(call.prompt, 0, 0))
            waiting.remove(call)
            shares.leave(call.tenant, "")
            running.append(call)
            waiting.append(
                Call(call.tenant, "", *shapes[call.tenant], first_token_deadline=call.first_token_deadline + 3)
            )
            shares.join(call.tenant, "")
        for call in running:
            charge(call, token_cost(0, 1, 0))
            call.made += 1
        running = [call for call in running if call.made < call.output]
        assert max(served.values()) - min(served.values()) <= bound + 1e-6


def test_a_pause_banks_no_credit() -> None:
    """Who comes back begins level with those who waited meanwhile, and not below."""
    shares = FairShares()
    shares.join("idle", "")
    shares.charge("idle", "", 1, 10)
    shares.leave("idle", "")
    shares.join("busy", "")
    shares.charge("busy", "", 1, 1000)
    shares.join("idle", "")
    assert shares.tenant("idle") == shares.tenant("busy")


def test_who_was_ahead_stays_so_after_a_pause() -> None:
    """Leaving the queue pays no debt off."""
    shares = FairShares()
    for tenant in ("greedy", "busy"):
        shares.join(tenant, "")
    shares.charge("greedy", "", 1, 500)
    shares.leave("greedy", "")
    shares.join("greedy", "")
    assert shares.tenant("greedy") - shares.tenant("busy") == 500


def test_a_call_taken_up_makes_the_others_turn_come() -> None:
    """Within one walk through the queue, so that one iteration fills its rows fairly."""
    shares, calls = FairShares(), [Call(tenant, "", 10, 1, first_token_deadline=i) for i, tenant in enumerate("aaabbb")]
    for call in calls:
        shares.join(call.tenant, "")
    order = []
    for call in in_fair_order(calls, shares):
        shares.charge(call.tenant, "", 2.0 if call.tenant == "a" else 1.0, token_cost(call.prompt, 0, 0))
        order.append(call.tenant)
    assert "".join(order) == "abaabb"


@pytest.mark.parametrize("rank", [0, 64, 128])
def test_a_larger_rank_costs_more(rank: int) -> None:
    assert token_cost(100, 50, rank) == 200 * (1 + rank / 256)


@given(ahead=st.lists(st.floats(1, 1e6), min_size=50, max_size=200))
def test_few_of_many_who_went_are_remembered(ahead: list[float]) -> None:
    """And whoever is forgotten comes back level with those who wait, never below."""
    counters = Counters(max_idle=10)
    counters.join("stays")
    for number, service in enumerate(ahead):
        counters.join(f"t{number}")
        counters.leave(f"t{number}")
        counters.charge(f"t{number}", service)
        assert len(counters) <= 24
    counters.charge("stays", 1e9)
    counters.join("later")
    counters.join("t0")
    assert counters["later"] == counters["t0"] == counters["stays"]
