"""What is kept of routing decisions: found by each of its names, bounded, and shared fairly."""

from __future__ import annotations

from cluster.node_table import Demand
from gateway.calls.explanations import MAX_OF_CALL, CallKey, Explained, Explanations, RoutingRecord
from gateway.scheduling.request import RoutingRequest


def record(request_id: str = "inv_1-0") -> RoutingRecord:
    request = RoutingRequest(request_id, Demand(0, 1, 1), digest=None, adapter_bytes=0)
    return RoutingRecord(request, "routed", "n", "rank_aware", 0.0, 0.0, 1, (), None)


def call(number: int, tenant: str = "t", request_id: str | None = None) -> CallKey:
    return CallKey(f"inv_{number}", request_id or f"req_{number}", tenant, "f")


def keep(store: Explanations, made: CallKey) -> None:
    store.keep(made, record(f"{made.id}-0"))


def find(store: Explanations, wanted: str, tenant: str | None) -> Explained | None:
    return store.find(wanted, tenant)


def test_each_name_finds_it_for_its_tenant_alone() -> None:
    store = Explanations()
    keep(store, call(1))
    for name in ("inv_1", "inv_1-0", "inv_1-7", "req_1"):
        for whose in ("t", None):
            found = find(store, name, whose)
            assert found is not None and found.call.id == "inv_1"
        assert find(store, name, "other") is None
    for name in ("", "inv_", "inv_2", "-0", "req_1-0"):
        assert find(store, name, None) is None


def test_a_request_id_that_several_used() -> None:
    store = Explanations()
    keep(store, call(1, "t", "mine"))
    keep(store, call(2, "other", "mine"))
    keep(store, call(3, "other", "inv_1"))  # one that names itself like another's call
    mine, theirs, any_ones = (find(store, "mine", tenant) for tenant in ("t", "other", None))
    assert mine is not None and mine.call.id == "inv_1"
    assert theirs is not None and any_ones is not None and theirs.call.id == any_ones.call.id == "inv_2"
    odd = find(store, "inv_1", "other")
    assert odd is not None and odd.call.id == "inv_3"
    keep(store, call(4, "t", "mine"))
    again = find(store, "mine", "t")
    assert again is not None and again.call.id == "inv_4"


def test_a_call_with_many_placements_is_bounded() -> None:
    store, made = Explanations(), call(1)
    for _ in range(MAX_OF_CALL + 5):
        keep(store, made)
    found = find(store, "inv_1", "t")
    assert found is not None and (len(found.records), found.left_out) == (MAX_OF_CALL, 5)


def test_the_oldest_goes_and_no_tenant_pushes_out_another() -> None:
    store = Explanations(max_records=60)
    for number in range(20):
        keep(store, call(number, "small"))
    for number in range(100, 200):
        keep(store, call(number, "large"))
    kept = [number for number in range(200) if find(store, f"inv_{number}", None)]
    assert kept == [*range(20), *range(160, 200)]
    keep(store, call(20, "small"))  # its share is not full: the oldest of all goes, its own
    assert find(store, "inv_20", "small") is not None
    assert sum(find(store, f"inv_{number}", None) is not None for number in range(200)) == 60
    assert len(store._latest_by_request) == 120


def test_calls_with_many_placements_count_as_many() -> None:
    store = Explanations(max_records=40)
    for number in range(10):
        for _ in range(10):
            keep(store, call(number))
    assert [number for number in range(10) if find(store, f"inv_{number}", "t")] == [6, 7, 8, 9]


def test_more_tenants_than_placements_are_kept() -> None:
    store = Explanations(max_records=3)
    for number in range(20):
        keep(store, call(number, f"t{number}"))
        assert find(store, f"inv_{number}", f"t{number}") is not None
    assert len(store._tenants) == len(store._calls) == 3
