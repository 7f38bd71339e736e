"""A full queue and functions with places kept for them; and the device time of requests that were computed together."""

from __future__ import annotations

import random

import pytest

from cluster.messages import Sampling
from node_agent.engine.request import Request
from node_agent.engine.rows import Row, share_out
from node_agent.engine.waiting import WaitingQueue
from tests.support.local_engine import LocalEngine, MakeEngine

STORY = [1, 403, 407, 261]


def request(name: str, tenant: str, function: str, reserved: int = 0, tokens: int = 4) -> Request:
    return Request(name, tenant, [1] * tokens, 4, Sampling(), 1e9, None, False, function=function, reserved=reserved)


@pytest.mark.parametrize("seed", range(4))
def test_only_calls_within_what_is_kept_push_others_of_their_tenant_out(seed: int) -> None:
    """Drawn queues of one tenant: against a plain count of the function's waiting requests."""
    rng = random.Random(seed)
    queue = WaitingQueue(8)
    waiting = [request(str(n), "t", rng.choice(["f", "g", "h"])) for n in range(8)]
    waiting = [request(r.id, "t", r.function, reserved=3 if r.function == "f" else 0) for r in waiting]
    for each in waiting:
        queue.add(each)
    begun = rng.choice(waiting)
    begun.tokens.append(5)  # it has begun to answer
    others = [r for r in waiting if r.function != "f" and r is not begun]
    for kept in range(1, 9):
        newcomer = request("new", "t", "f", reserved=kept)
        within = sum(r.function == "f" and r is not begun for r in waiting) < kept
        assert queue.displaced_by(newcomer) is (others[-1] if within and others else None)
    assert queue.displaced_by(request("new", "t", "g")) is None
    assert queue.displaced_by(request("new", "t", "h", reserved=0)) is None
    assert queue.displaced_by(request("new", "u", "f")) in waiting, "another tenant has its own share"


def test_a_reserved_call_gets_into_a_queue_that_its_own_tenant_has_filled(make_engine: MakeEngine) -> None:
    engine = make_engine(max_rows=1, queue_limit=4)
    flood = [engine.submit(STORY, 2, tenant="t", function="g", ignore_eos=True) for _ in range(8)]
    late = engine.submit(STORY, 2, tenant="t", function="f", reserved=1, ignore_eos=True)
    more = engine.submit(STORY, 2, tenant="t", function="f", reserved=1, ignore_eos=True)
    engine.run()
    assert reasons(engine, [late]) == ["length"]
    assert reasons(engine, [more]) == ["error"], "one place is kept, and it is taken"
    assert reasons(engine, flood).count("error") == 5, "four that found it full, and the newest of the others"


def reasons(engine: LocalEngine, requests: list[str]) -> list[str]:
    outcomes = (engine.outcomes[each].finished for each in requests)
    return [outcome.reason for outcome in outcomes if outcome is not None]


def test_device_time_is_shared_by_tokens() -> None:
    """All of a pass's time, and nothing else, is counted."""
    rng = random.Random(1)
    requests = [request(str(n), "t", "f", tokens=rng.randint(1, 30)) for n in range(5)]
    spent = dict.fromkeys((r.id for r in requests), 0.0)
    for _ in range(20):
        rows = [Row(r, rng.randint(1, 9)) for r in rng.sample(requests, rng.randint(1, 5))]
        seconds = rng.uniform(0.001, 2.0)
        share_out(seconds, rows)
        for row in rows:
            spent[row.request.id] += seconds * row.length / sum(each.length for each in rows)
    assert {r.id: r.device_seconds for r in requests} == pytest.approx(spent)


def test_what_requests_are_told_of_device_time_is_no_more_than_the_engine_computed(make_engine: MakeEngine) -> None:
    engine = make_engine(max_rows=4)
    computed = 0.0
    real = engine.engine.hot.compute

    def noted(*args: object, **named: object) -> object:
        nonlocal computed
        found = real(*args, **named)  # type: ignore[arg-type]
        computed += getattr(found, "seconds", 0.0)
        return found

    engine.engine.hot.compute = noted  # type: ignore[method-assign, assignment]
    asked = [engine.submit(STORY, length, ignore_eos=True) for length in (1, 4, 8)]
    engine.run()
    told = [engine.outcomes[each].finished for each in asked]
    seconds = [outcome.device for outcome in told if outcome is not None]
    assert sum(seconds) == pytest.approx(computed)
    assert seconds == sorted(seconds) and seconds[0] > 0
