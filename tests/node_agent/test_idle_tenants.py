"""The first call of a tenant that was idle for long is taken up at once, whatever another tenant has filled."""

from __future__ import annotations

import pytest

from node_agent.engine import reserves
from node_agent.engine.preemption import MAX_PREEMPTIONS
from node_agent.ipc import Finished
from tests.node_agent.test_preemption import BLOCK_BYTES, STORY, ended
from tests.support.exact import Case, Tally, check
from tests.support.local_engine import LocalEngine, MakeEngine
from tests.support.peft_reference import PeftReference

FEW_PASSES = 3
LONG = 100


def passes_until_first_token(engine: LocalEngine, request: str) -> int:
    for count in range(1, LONG):
        engine.step()
        if engine.outcomes[request].tokens:
            return count
    return LONG


def flooded(engine: LocalEngine, count: int = 60, length: int = LONG, tenant: str = "flood", **owner: str) -> list[str]:
    """A batch that one tenant alone has filled, to the last row or KV block, and has much more for."""
    flood = [engine.submit(STORY, length, tenant=tenant, ignore_eos=True, **owner) for _ in range(count)]
    for _ in range(8):
        engine.step()
    assert len(engine.outcomes[flood[0]].tokens) > 3
    return flood


@pytest.mark.parametrize("full", ["rows", "blocks"])
def test_the_first_call_does_not_wait(make_engine: MakeEngine, reference: PeftReference, full: str) -> None:
    rows, blocks = (8, 1000) if full == "rows" else (64, 8 * (len(STORY) + LONG) // 4 + 5)
    engine = make_engine(max_rows=rows, block_tokens=4, kv_memory=BLOCK_BYTES * (blocks + 1))
    flood = flooded(engine)
    assert len(engine.engine.running) == 8, "nothing more fits"
    call = engine.submit(STORY, 20, tenant="idle", ignore_eos=True)
    assert passes_until_first_token(engine, call) <= FEW_PASSES
    engine.run(until=lambda: engine.outcomes[call].finished is not None)
    assert ended(engine, call).preemptions == 0
    assert not check(engine, reference, Case(None, None, STORY, 20), engine.outcomes[call].tokens, Tally())
    engine.run(until=lambda: all(engine.outcomes[r].finished is not None for r in flood[:8]))
    assert sum(ended(engine, r).preemptions for r in flood[:8]) == 1
    case = Case(None, None, STORY, LONG)
    assert not [p for r in flood[:8] for p in check(engine, reference, case, engine.outcomes[r].tokens, Tally())]
    engine.end()


def test_its_next_calls_take_what_is_kept_and_no_more(make_engine: MakeEngine) -> None:
    """One call in so many seconds is the first: nobody gets a batch of preempted places by calling often."""
    engine = make_engine(max_rows=8)
    flood = flooded(engine)
    calls = [engine.submit(STORY, LONG, tenant="idle", ignore_eos=True) for _ in range(6)]
    for _ in range(10):
        engine.step()
    assert sum(bool(engine.outcomes[r].tokens) for r in calls) == 1
    assert sum(r.preemptions for r in engine.engine.queue) == 1
    engine.engine.cancel(calls[0])
    for call in calls[1:]:
        engine.engine.cancel(call)
    engine.step()
    again = engine.submit(STORY, 2, tenant="idle", ignore_eos=True)
    assert passes_until_first_token(engine, again) <= FEW_PASSES, "a row is kept for it now"
    assert sum(engine.outcomes[r].finished is not None for r in flood) == 0
    engine.end()


def test_nobody_falls_below_an_equal_share(make_engine: MakeEngine) -> None:
    """Tenants that have one row each keep it, and so do requests that were preempted often."""
    engine = make_engine(max_rows=4)
    for i in range(4):
        engine.submit(STORY, LONG, tenant=f"t{i}", ignore_eos=True)
    for _ in range(3):
        engine.step()
    running = set(engine.engine.running)
    late = engine.submit(STORY, 2, tenant="late", ignore_eos=True)
    for _ in range(5):
        engine.step()
    assert set(engine.engine.running) == running and not engine.outcomes[late].admitted
    engine.end()
    engine.engine.scheduler.callers = reserves.Callers()
    flooded(engine)
    for request in engine.engine.running.values():
        request.preemptions = MAX_PREEMPTIONS
    later = engine.submit(STORY, 2, tenant="later", ignore_eos=True)
    engine.step()
    assert not engine.outcomes[later].admitted
    engine.end()


def test_strict_requests_keep_their_places_and_best_effort_takes_none(make_engine: MakeEngine) -> None:
    engine = make_engine(max_rows=4)
    flooded(engine, slo_class="strict", tenant="dear")
    call = engine.submit(STORY, 2, tenant="idle", ignore_eos=True)
    engine.step()
    assert not engine.outcomes[call].admitted
    engine.end()
    engine.engine.scheduler.callers = reserves.Callers()
    flooded(engine)
    cheap = engine.submit(STORY, 2, tenant="cheap", slo_class="best_effort", ignore_eos=True)
    engine.step()
    assert not engine.outcomes[cheap].admitted
    engine.end()


def test_a_call_too_large_for_its_share_waits(make_engine: MakeEngine) -> None:
    engine = make_engine(max_rows=16, block_tokens=4, kv_memory=BLOCK_BYTES * (8 * 26 + 1))
    flood = flooded(engine, 20, 100)
    large = engine.submit(STORY, 500, tenant="idle", ignore_eos=True)
    fits = engine.submit(STORY, 400, tenant="other", ignore_eos=True)
    engine.step()
    assert not engine.outcomes[large].admitted
    assert engine.outcomes[fits].admitted
    assert sum(r in engine.engine.running for r in flood) == 4, "half of the blocks are its own share"
    for request in flood:
        engine.engine.cancel(request)
    engine.run()
    found = engine.outcomes[large].finished
    assert isinstance(found, Finished) and found.reason == "length"
