"""Where adapters are brought: the same nodes in every worker, evenly, and where routing then sends the calls."""

from __future__ import annotations

import hashlib
import random

import msgspec
import pytest
from scheduling_world import REQUEST, chosen, node, table_of

from cluster.news import Resident
from gateway.scheduling.home_nodes import HomeNodes
from gateway.scheduling.rank_aware import RankAware

DIGESTS = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(400)]


def homes(*nodes: object) -> dict[str, list[str | None]]:
    table = table_of(*nodes)  # type: ignore[arg-type]
    found = HomeNodes(table, "b")
    return {digest: [table.ids[row] for row in found.of(digest, 2)] for digest in DIGESTS}


def test_homes_stay_when_nodes_come_and_go() -> None:
    ids = [f"n{number}" for number in range(8)]
    before = homes(*map(node, ids))
    assert before == homes(*(node(each) for each in random.Random(1).sample(ids, 8))), "in whatever order they came"
    without = homes(*(node(each) for each in ids if each != "n3"))
    for digest, (first, second) in before.items():
        assert without[digest][0] == (second if first == "n3" else first)
    counts = [sum(first == each for first, _ in before.values()) for each in ids]
    assert min(counts) > 25 and max(counts) < 85, "50 each, drawn"


def test_nodes_that_do_not_take_the_rank_are_no_homes() -> None:
    nodes = [msgspec.structs.replace(node(f"n{limit}"), rank_limit=limit) for limit in (0, 8, 64)]
    table = table_of(*nodes)
    found = HomeNodes(table, "b")
    for digest in DIGESTS[:20]:
        for rank, expected in ((8, 3), (9, 2), (64, 2), (65, 1)):
            rows = found.of(digest, 9, rank)
            assert len(rows) == expected
            assert rows == [row for row in found.of(digest, 9) if row in rows], "in the same order"
            assert all(int(table.rank_limit[row]) >= rank for row in rows)


def test_a_node_that_has_it_comes_first_and_one_that_does_not_serve_never() -> None:
    digest = DIGESTS[0]
    held = {tier: [Resident(digest, tier, 1, 0)] for tier in ("disk", "host", "device")}
    nodes = [node("none"), *(node(tier, residents=residents) for tier, residents in held.items())]
    table = table_of(*nodes, node("gone", state="draining", residents=held["device"]), node("else", base="c"))
    found = HomeNodes(table, "b")
    assert [table.ids[row] for row in found.of(digest, 9)] == ["device", "host", "disk", "none"]
    assert (len(found), len(HomeNodes(table_of(), "b").of(digest, 3))) == (4, 0)


@pytest.mark.parametrize("seed", range(20))
def test_calls_go_where_it_was_brought(seed: int) -> None:
    """Nodes with equally much to do: routing chooses the home once the adapter is there."""
    digest, ids = DIGESTS[seed], [f"n{number}" for number in range(5)]
    request = msgspec.structs.replace(REQUEST, digest=digest)
    table = table_of(*map(node, ids))
    home = table.ids[HomeNodes(table, "b").of(digest, 1)[0]]
    brought = [node(each, residents=[Resident(digest, "device", 1000, 0)] if each == home else []) for each in ids]
    assert chosen(RankAware(), table_of(*brought), request) == home
