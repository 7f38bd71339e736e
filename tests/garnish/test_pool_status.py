"""What `garnish infra show` tells of pools, by what is desired, what Terraform's state holds and what lives."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from garnish.pool_status import Observed, PoolStatus, pool_statuses
from tests.infra.stacks import pool, stack

TWO = frozenset({"here-1", "here-2"})
THREE = TWO | {"here-3"}
MADE = {"here": {"backend": "local", "desired": 2, "nodes": ["here-1", "here-2"]}}
ALIVE = {"here-1": "alive", "here-2": "alive"}
SEEN = Observed(applied=MADE, managed=TWO, tainted=(), alive=TWO, states={})


def of_here(**changed: Any) -> PoolStatus:
    """With two nodes desired and made."""
    (status,) = pool_statuses(stack(pool("here", 2)), msgspec.structs.replace(SEEN, **changed))
    return status


@pytest.mark.parametrize(
    ("changed", "nodes", "drift"),
    [
        ({}, ALIVE, []),
        ({"states": {"here-1": "draining"}}, {**ALIVE, "here-1": "draining"}, []),
        ({"alive": {"here-1"}, "states": {"here-2": "ready"}}, {**ALIVE, "here-2": "dead"}, ["here-2 has died"]),
        ({"alive": THREE}, {**ALIVE, "here-3": "alive"}, ["here-3 runs, and no state holds it"]),
        ({"managed": THREE}, {**ALIVE, "here-3": "dead"}, ["here-3 was to go, and its end broke off"]),
        ({"tainted": {"here-2"}}, ALIVE, ["here-2: its creation did not end well"]),
        ({"applied": {}, "managed": (), "alive": ()}, {}, ["not applied yet"]),
        ({"applied": {"here": {**MADE["here"], "desired": 3}}}, ALIVE, ["desired is 2, applied 3"]),
    ],
)
def test_what_differs_is_drift(changed: dict[str, Any], nodes: dict[str, str], drift: list[str]) -> None:
    status = of_here(**changed)
    assert (status.nodes, status.drift) == (nodes, drift)


def test_nodes_are_told_in_the_order_of_their_numbers() -> None:
    assert list(of_here(managed={"here-10", "here-9", "here-1"}).nodes) == ["here-1", "here-2", "here-9", "here-10"]


def test_a_size_of_the_autoscaler_is_told() -> None:
    (status,) = pool_statuses(stack(pool("here", 2, stated=1)), SEEN)
    assert (status.desired, status.drift) == (2, ["the autoscaler has set 2, serverless.yml says 1"])


def test_a_pool_that_is_no_longer_declared_is_told_while_anything_of_it_is_there() -> None:
    lost = msgspec.structs.replace(SEEN, applied={}, managed=())
    for seen, applied in ((SEEN, 2), (lost, None)):
        _, gone = pool_statuses(stack(pool("other", 0)), seen)
        assert (gone.pool, gone.backend, gone.desired, gone.applied) == ("here", "local", 0, applied)
        assert (gone.nodes, gone.drift) == (dict.fromkeys(sorted(TWO), "undeclared"), ["no longer declared"])


def test_a_pool_in_aws_has_the_instances_that_report() -> None:
    made = {"l4": {"backend": "aws", "desired": 1}}
    states = {"l4-i-0abc-0": "ready", "l4-1": "ready", "l40-i-0abc-0": "ready"}
    (status,) = pool_statuses(stack(pool("l4", 1, backend="aws")), Observed(made, (), (), (), states))
    assert (status.nodes, status.drift) == ({"l4-i-0abc-0": "ready"}, [])
