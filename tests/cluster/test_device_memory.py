"""Division of a device's memory into weights, adapter slots, and keys and values."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.device_memory import GIB, MemoryTarget, NoRoom, plan_memory, with_rank
from tests.support.draws import draws

sizes = st.integers(1, 1000)


@settings(max_examples=draws(200), deadline=None)
@given(
    weights=sizes, slot=sizes, runtime=sizes, device=st.integers(1, 5000), min_kv=sizes, most=st.integers(1, 64),
    slots=st.none() | st.integers(1, 64), kv=st.none() | sizes, share=st.floats(0, 0.99),
)  # fmt: skip
def test_a_plan_fits_and_gives_what_was_stated(
    weights: int, slot: int, runtime: int, device: int, min_kv: int, most: int, slots: int | None, kv: int | None,
    share: float,
) -> None:  # fmt: skip
    target = MemoryTarget(slots=slots, max_slots=most, kv=kv, min_kv=min_kv, kv_share=share)
    needed = weights + runtime + (slots or 1) * slot + (min_kv if kv is None else kv)
    try:
        plan = plan_memory(target, weights=weights, slot=slot, runtime=runtime, device=device)
    except NoRoom:
        assert needed > device
        return
    assert needed <= plan.total <= device
    assert (plan.weights, plan.slot, plan.runtime, plan.device) == (weights, slot, runtime, device)
    if slots is not None:
        assert plan.slots == slots
    assert 1 <= plan.slots <= (slots or most)
    assert plan.kv == kv if kv is not None else plan.kv >= min_kv
    rest = device - weights - runtime
    if slots is None and kv is None and plan.slots > 1:
        assert plan.kv >= int(share * rest), "more slots than the share of keys and values leaves"
    if slots is None and plan.slots < most:
        kept = kv if kv is not None else max(min_kv, int(share * rest))
        assert kept + (plan.slots + 1) * slot > rest, "another slot would have fitted"


def test_the_sum_is_written_out() -> None:
    target = MemoryTarget(slots=4, max_slots=9, kv=None, min_kv=int(2 * GIB))
    gib = {"weights": int(15 * GIB), "slot": int(GIB / 2), "runtime": int(GIB)}
    with pytest.raises(NoRoom) as refused:
        plan_memory(target, **gib, device=int(19 * GIB))
    assert str(refused.value) == (
        "15.0 weights + 2.0 adapter slots (4 x 0.50) + 2.0 keys and values + 1.0 runtime = 20.0 GiB of 19.0 GiB"
    )
    assert plan_memory(target, **gib, device=int(20 * GIB)).kv == int(2 * GIB)


def test_another_rank_takes_memory_from_keys_and_values() -> None:
    plan = plan_memory(
        MemoryTarget(slots=4, max_slots=9, kv=None, min_kv=10), weights=100, slot=10, runtime=10, device=200
    )
    assert (plan.kv, plan.total) == (50, 200)
    assert (with_rank(plan, 8, 16).slot, with_rank(plan, 8, 16).kv, with_rank(plan, 8, 16).total) == (20, 10, 200)
    assert (with_rank(plan, 8, 32).kv, with_rank(plan, 8, 32).total) == (0, 270)
