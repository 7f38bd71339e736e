"""The traps of routing: each test names the node that a simpler rule would choose."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
from scheduling_world import MEASURED, ask, chosen, node, slow, table_of

from cluster.news import StrictRoom
from cluster.node_table import Demand
from cluster.performance_model import Transfer
from garnish.simulation.profile import load_profile
from gateway.scheduling.policy import make_policy
from gateway.scheduling.rank_aware import RETRY_BOUNDS, RankAware
from gateway.scheduling.toppings import Toppings
from tests.support.listed_record import put_record


def test_an_idle_node_without_the_adapter_loses_to_one_that_has_it_and_one_request() -> None:
    nodes = table_of(node("cold"), node("warm", 16, tier="device"))
    assert chosen(RankAware(), nodes) == "warm"
    assert chosen(Toppings(), nodes) == "cold"  # to which every idle node is free
    assert chosen(make_policy("most_idle"), nodes) == "cold"


def test_it_wins_where_the_load_is_short() -> None:
    assert chosen(RankAware(), table_of(node("near", tier="host"), node("warm", 16, tier="device"))) == "near"


def test_what_is_on_the_link_already_counts() -> None:
    busy = node("busy", tier="host", loading_bytes=4_000_000_000)
    assert chosen(RankAware(), table_of(busy, node("free", tier="host"))) == "free"


def test_an_idle_node_that_breaks_the_promise_is_out() -> None:
    nodes = table_of(node("slow", tier="device", performance=slow(3.0)), node("fast", 16, 16, tier="device"))
    request, policy = ask(tpot=0.06), RankAware()
    assert chosen(policy, nodes, request) == "fast"
    assert policy.last is not None and policy.last.totals[0] == np.inf
    assert chosen(Toppings(), nodes, request) == "slow"  # penalty * 0 requests


def test_promises_to_others_count() -> None:
    """A large rank slows everybody in the batch."""
    request = ask(rank=512)
    crowd = node("promised", 8, 8, tier="device", tightest_tpot=0.0312)
    other = node("busy", 8, 8, 8, 8, 8, tier="device")
    assert chosen(RankAware(), table_of(crowd, other), ask(rank=8)) == "promised"
    assert chosen(RankAware(), table_of(crowd, other), request) == "busy"
    reserved = table_of(node("promised", 8, tier="device"), other)
    reserved.reserve(0, "x", Demand(rank=8, prompt_tokens=10, max_tokens=10, tpot=0.0312))
    assert chosen(RankAware(), reserved, request) == "busy"


def test_a_queue_that_outlasts_the_first_tokens_promise_is_out() -> None:
    nodes = table_of(
        node("prompts", tier="device", prompt_tokens_left=10_000),
        node("rows", *[8] * 32, tier="device", queued=20),
        node("memory", 8, tier="device", kv_blocks=30, kv_blocks_free=3),
        node("free", *[8] * 20, tier="device"),
    )
    policy = RankAware()
    assert chosen(policy, nodes, ask(ttft=0.5)) == "free"
    assert policy.last is not None and np.isinf(policy.last.totals).tolist() == [True, True, True, False]
    chosen(policy, nodes)
    assert np.isfinite(policy.last.totals).all()


def test_ranks_that_fit_are_kept_together() -> None:
    """By the model of BGMV, which pads every request to the largest rank of its batch."""
    decode = msgspec.structs.replace(MEASURED.decode, rank_term="max_rank")
    bgmv = msgspec.structs.replace(MEASURED, decode=decode)
    nodes = table_of(
        node("small", 8, 8, 8, tier="device", performance=bgmv),
        node("large", 64, 64, 64, tier="device", performance=bgmv),
    )
    assert chosen(RankAware(), nodes, ask(rank=64)) == "large"
    assert chosen(RankAware(), nodes, ask(rank=8)) == "small"


def test_equals_keep_the_adapter_where_it_is() -> None:
    hidden = msgspec.structs.replace(MEASURED, exposed_share=0.0)  # loads cost nothing here
    for tier in ("device", "host", "disk"):
        nodes = table_of(node("a", performance=hidden), node("b", tier=tier, performance=hidden))
        assert chosen(RankAware(), nodes) == "b"
    nodes = table_of(node("a", kv_blocks_free=1000), node("b"))
    assert chosen(RankAware(), nodes, ask(digest=None, rank=0)) == "b"


@pytest.mark.parametrize(
    "column",
    ["decode_there", "prefill_per_token", "device_wait", "device_per_byte", "store_latency", "exposed_share"],
)
@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0])
def test_no_odd_number_makes_a_node_win(column: str, value: float) -> None:
    """Records with such numbers are refused when they come in; this is what would come of one that was not."""
    nodes = table_of(node("odd"), node("sane", 16, 16, 16))
    getattr(nodes, column)[0] = value
    policy = RankAware()
    found = chosen(policy, nodes, ask(ttft=10.0, tpot=1.0))
    assert policy.last is not None
    assert not np.isnan(policy.last.totals).any()
    if not np.isfinite(value):
        assert found == "sane"
    chosen(Toppings(), nodes, ask(tpot=1.0))
    table = table_of(node("odd"))
    getattr(table, column)[0] = value
    assert chosen(RankAware(), table, ask(ttft=10.0, tpot=1.0)) == "odd"  # the only one, whatever it says


@pytest.mark.parametrize(
    "model",
    [
        slow(float("nan")),
        slow(-1.0),
        slow(float("inf")),
        slow(0.0),
        msgspec.structs.replace(MEASURED, to_device=Transfer(0.001, 0.0)),
        msgspec.structs.replace(MEASURED, from_store=Transfer(0.001, float("inf"))),
        msgspec.structs.replace(MEASURED, exposed_share=float("nan")),
    ],
)
def test_a_model_that_is_none_is_not_used(model: object) -> None:
    nodes = table_of(node("odd", performance=model), node("sane", performance=None))
    assert nodes.model_problem(0) is not None
    assert not nodes.modelled[0]
    assert nodes.decode_base[0] == nodes.decode_base[1]
    put_record(nodes, node("odd"))
    assert (nodes.model_problem(0), bool(nodes.modelled[0])) == (None, True)


def test_when_all_break_a_promise() -> None:
    """Strict requests are sent away for as long as it takes; others go where it is broken least."""
    nodes = table_of(*(node(name, *[8] * 32, tier="device", queued=more) for name, more in (("a", 9), ("b", 3))))
    strict = ask(ttft=0.1, slo_class="strict")
    policy = RankAware()
    assert chosen(policy, nodes, strict) is None
    assert policy.last is not None
    low, high = RETRY_BOUNDS
    assert low <= policy.last.retry_after <= high
    assert policy.last.retry_after == max(low, policy.last.terms.ttft.min() - 0.1)
    assert chosen(policy, nodes, ask(ttft=0.1)) == "b"
    assert chosen(policy, nodes, ask(ttft=0.1, slo_class="best_effort")) == "b"
    crowded = table_of(
        *(node(name, *[8] * 9, tier="device", tightest_tpot=tpot) for name, tpot in (("a", 0.031), ("b", 0.0315)))
    )
    assert chosen(policy, crowded, ask(slo_class="strict")) is None
    assert low <= policy.last.retry_after <= high
    assert chosen(policy, crowded) == "b"


def test_a_strict_request_is_not_sent_away_for_what_waiting_can_not_mend() -> None:
    """An adapter that is nowhere yet, or a promise that no node could ever keep: it would be sent away for ever."""
    policy = RankAware()
    cold = table_of(node("cold"), node("colder", loading_bytes=10**9))
    assert chosen(policy, cold, ask(ttft=0.1, slo_class="strict")) == "cold"
    assert chosen(policy, cold, ask(ttft=10.0, tpot=0.01, slo_class="strict")) == "cold"
    warm = node("warm", *[8] * 32, tier="device", queued=20)
    assert chosen(policy, table_of(node("cold"), warm), ask(ttft=0.2, slo_class="strict")) is None
    assert policy.last is not None
    until = policy.last.terms.ttft[1] - 0.2
    assert until > 2 and policy.last.retry_after == pytest.approx(until), "when the one that has it can"
    linked = table_of(node("near", tier="host", loading_bytes=16_000_000_000))
    assert chosen(policy, linked, ask(ttft=0.2, slo_class="strict")) is None, "once the link is free it can"


def test_strict_requests_find_what_best_effort_gives_up() -> None:
    """A node that is full of it is not full for them."""
    flood = {"tier": "device", "queued": 50, "prompt_tokens_left": 20_000, "kv_blocks_free": 3}
    request, policy = ask(ttft=0.5, slo_class="strict"), RankAware()
    assert chosen(policy, table_of(node("a", *[8] * 32, **flood)), request) is None
    nodes = table_of(node("a", *[8] * 32, strict=StrictRoom(rows=20, blocks=2000), **flood))
    for index in range(40):
        nodes.reserve(0, f"best-effort-{index}", Demand(16, 100, 200, slo_class="best_effort"))
    assert chosen(policy, nodes, request) == "a"
    assert policy.last is not None and policy.last.terms.wait.tolist() == [0.0]
    chosen(policy, nodes, ask(ttft=0.5))
    assert np.isinf(policy.last.totals).all(), "others do find it full"
    for index in range(40):
        nodes.reserve(0, f"strict-{index}", Demand(16, 100, 200, slo_class="strict"))
    assert chosen(policy, nodes, request) is None


def test_strict_steps_are_those_in_which_best_effort_pauses() -> None:
    """For those alone who were promised a time between tokens: nobody pauses for others."""
    flood = {"tier": "device", "batch_contexts": [1000] * 32}
    busy, request = node("a", *[8] * 32, **flood), ask(tpot=0.036, slo_class="strict")
    policy = RankAware()
    assert chosen(policy, table_of(busy), request) is None
    assert policy.last is not None
    full = policy.last.terms.step[0]
    assert full > 0.036
    paused = node("a", *[8] * 32, **flood, strict=StrictRoom(32, 2000, paused_rows=24, paused_contexts=24_000))
    assert chosen(policy, table_of(paused), request) == "a"
    saved = 24 * MEASURED.decode.per_row + 24_000 * MEASURED.decode.per_context
    assert policy.last.terms.step[0] == pytest.approx(full - saved * 32 / 33), "32 of 33 are computed at once"
    for other in (ask(tpot=0.036), ask(slo_class="strict")):
        chosen(policy, table_of(paused), other)
        assert policy.last.terms.step[0] == pytest.approx(full)


def test_no_more_pauses_are_counted_on_than_strict_promises_ask_for() -> None:
    """Best effort does not pause for one that has time: a step is then too long for others who were promised one."""
    lax, policy = ask(tpot=0.5, slo_class="strict"), RankAware()
    flood = {"tier": "device", "batch_contexts": [1000] * 32, "tightest_tpot": 0.036}
    room = StrictRoom(32, 2000, paused_rows=24, paused_contexts=24_000)
    assert chosen(policy, table_of(node("a", *[8] * 32, **flood, strict=room)), lax) is None
    room = msgspec.structs.replace(room, tightest_tpot=0.036)
    nodes = table_of(node("a", *[8] * 32, **flood, strict=room))
    assert chosen(policy, nodes, lax) == "a", "they pause for another strict one"
    assert policy.last is not None
    assert 0.8 * 0.036 < policy.last.terms.step[0] < 0.036
    nodes = table_of(node("a", *[8] * 32, **flood, queued=32, queued_ranks=[8] * 32, max_rows=32, strict=room))
    chosen(policy, nodes, ask(tpot=0.036, slo_class="strict"))
    saved = 24 * MEASURED.decode.per_row + 24_000 * MEASURED.decode.per_context
    whole = nodes.decode_there[0] + policy.last.terms.decode[0] - MEASURED.decode.base
    wanted = MEASURED.decode.base + (whole - saved) * 32 / 65
    assert policy.last.terms.step[0] == pytest.approx(wanted), "of the rows that are computed at once"


def test_no_pause_makes_a_step_shorter_than_an_empty_nodes() -> None:
    """However much a record says could pause, and however little time was promised."""
    policy, room = RankAware(), StrictRoom(32, 2000, paused_rows=24, paused_contexts=10**9)
    busy = node("a", *[8] * 32, tier="device", batch_contexts=[1000] * 32, strict=room)
    assert chosen(policy, table_of(busy), ask(tpot=MEASURED.decode.base / 2, slo_class="strict")) == "a", "none could"
    assert policy.last is not None and policy.last.terms.step[0] == pytest.approx(MEASURED.decode.base)


def test_a_promise_that_can_not_be_kept_keeps_nobody_out() -> None:
    """Of another request there, which no node could ever keep."""
    request = ask(tpot=0.06, slo_class="strict")
    nodes = table_of(node("a", 8, tier="device", tightest_tpot=0.001))
    nodes.reserve(0, "x", Demand(rank=8, prompt_tokens=10, max_tokens=10, tpot=0.001))
    assert chosen(RankAware(), nodes, request) == "a"
    nodes.reserve(0, "y", Demand(rank=8, prompt_tokens=10, max_tokens=10, tpot=0.0304))
    assert chosen(RankAware(), nodes, request) is None


def test_a_hot_adapter_gets_more_nodes_and_a_cool_one_stays() -> None:
    """Nodes look equal but for the requests that run there; nothing is resident, so that only homes can hold it."""

    def nodes_used(period: float, requests: int) -> int:
        now = 0.0
        policy = RankAware(lambda: now)
        free = msgspec.structs.replace(MEASURED, exposed_share=0.0)
        table = table_of(*(node(f"n{index}", performance=free) for index in range(8)))
        open_ones: list[tuple[float, int, str]] = []
        late: set[int] = set()
        for index in range(requests):
            now = index * period
            while open_ones and open_ones[0][0] <= now:
                _, row, request_id = open_ones.pop(0)
                table.release(row, request_id)
            row = policy.choose(table, np.arange(8), ask(id=str(index)))
            assert row is not None
            table.reserve(row, str(index), Demand(16, 100, 200))
            open_ones.append((now + 4.0, row, str(index)))
            if index > requests / 2:
                late.add(row)
        return len(late)

    assert nodes_used(period=5.0, requests=60) == 1
    assert nodes_used(period=0.01, requests=3000) == 8


def test_one_more_copy_of_an_adapter_counts() -> None:
    """Where its load is hidden, too: it displaces others, which somebody will wait for."""
    hidden = msgspec.structs.replace(MEASURED, exposed_share=0.0)
    idle = node("idle", tier="host", performance=hidden)
    has_it = node("has it", tier="device", performance=slow(1.001, hidden))
    policy = RankAware()
    assert chosen(policy, table_of(idle, has_it)) == "has it"
    assert policy.last is not None
    assert policy.last.terms.spreading.tolist() == [pytest.approx(0.001 + 40e6 / 8e9), 0.0]
    late = node("has it", *[8] * 32, tier="device", prompt_tokens_left=100_000, performance=hidden)
    assert chosen(policy, table_of(idle, late)) == "idle"


def test_ranks_do_not_pile_up_behind_full_rows() -> None:
    """By the model of BGMV a step costs least where the rank fits, however many wait there for a row."""
    decode = msgspec.structs.replace(MEASURED.decode, rank_term="max_rank", per_rank=2e-5)
    bgmv = msgspec.structs.replace(MEASURED, decode=decode)
    fields = {"tier": "device", "max_rows": 4, "performance": bgmv}
    other = node("other", 8, 8, 8, **fields)
    room = node("alike", 64, 64, 64, **fields)
    full = node("alike", 64, 64, 64, 64, queued=2, queued_ranks=[64, 64], **fields)
    assert chosen(RankAware(), table_of(room, other), ask(rank=64)) == "alike"
    policy = RankAware()
    assert chosen(policy, table_of(full, other), ask(rank=64)) == "other"
    assert policy.last is not None
    step = policy.last.terms.decode
    assert step[0] < step[1]


def test_the_example_of_the_page() -> None:
    """docs/design/scheduling.md has these numbers."""
    papers = load_profile("papers").performance
    model = msgspec.structs.replace(papers, key=msgspec.structs.replace(papers.key, base="b"))
    nodes = table_of(
        node("idle", tier="host", performance=model),
        node("alike", *[16] * 6, tier="device", performance=model),
        node("large", *[64] * 4, tier="device", performance=model, prompt_tokens_left=300),
    )
    policy = RankAware()
    assert (
        chosen(policy, nodes, ask(adapter_bytes=16 * 1_572_864, expected_tokens=96, expected_inverse=0.048)) == "idle"
    )
    assert policy.last is not None
    page = (Path(__file__).parents[3] / "docs" / "design" / "scheduling.md").read_text()
    shown = re.search(r"\| `total` \| \*\*(\S+)\*\* \| (\S+) \| (\S+) \|", page)
    assert shown is not None
    assert (policy.last.totals * 1e3).tolist() == pytest.approx([float(each) for each in shown.groups()], abs=0.006)
