"""Who gives way in a full queue: whoever keeps filling it, and never one who has his share of it or less."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.queue_shares import QueueShares, room_for_others

TENANTS = ("a", "b", "c")
WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5}


@given(arrivals=st.lists(st.sampled_from(TENANTS), max_size=120), limit=st.integers(1, 20))
def test_a_queue_ends_up_shared_by_weight(arrivals: list[str], limit: int) -> None:
    shares, held = QueueShares(), Counter[str]()
    for tenant in arrivals:
        if held.total() == limit:
            way = shares.tenant_to_displace(tenant, WEIGHTS[tenant])
            most = max(held, key=lambda name: held[name] / WEIGHTS[name])
            fair = (held[tenant] + 1) / WEIGHTS[tenant] < held[most] / WEIGHTS[most]
            assert (way is not None) == (fair and tenant != most)
            if way is None:
                continue
            assert held[way] / WEIGHTS[way] == held[most] / WEIGHTS[most]
            shares.leave(way)
            held[way] -= 1
        shares.join(tenant, WEIGHTS[tenant])
        held[tenant] += 1
        held = +held
        assert set(shares.tenants) == set(held)
    for tenant, count in held.items():
        for _ in range(count):
            shares.leave(tenant)
    assert (len(shares.tenants), shares.tenant_to_displace("a", 1.0)) == (0, None)


def test_who_does_not_wait_cannot_leave() -> None:
    with pytest.raises(KeyError):
        QueueShares().leave("a")


def test_room_for_others_is_bounded() -> None:
    assert [room_for_others(limit) for limit in (1, 32, 256)] == [4, 4, 32]
