"""Rounds over drivers: who leads, what is held and why, growth that waits for nodes, failures, groups at moto's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from infra.autoscale.aws import AwsDriver
from infra.autoscale.driver import Deferred, PoolSize, check_bounds
from infra.autoscale.rounds import (
    FIRST_PAUSE_S,
    GAP_SECONDS,
    IDLE,
    START_SECONDS,
    Autoscaler,
    LoadSnapshot,
    LoadUnknown,
    PoolView,
    ScaledPool,
)
from infra.autoscale.sizes import RecordingDriver, SetSize, read_sizes
from infra.autoscale.sizing import Load, Targets
from infra.errors import InfraError
from tests.infra.autoscale.conftest import REGION, MakeGroup

TARGETS = Targets(min=0, max=3, up_seconds=0.0, down_seconds=10.0, utilisation=0.5, scale_to_zero_after=20.0)


def load(demand: float, **fields: object) -> Load:
    return msgspec.structs.replace(IDLE, open_requests=1, demand=demand, **fields)


class Group:
    """A driver of which the tests say what it does."""

    def __init__(self, desired: int = 1, most: int = 3) -> None:
        self.known = PoolSize(min=0, desired=desired, max=most, live=desired)
        self.failures: list[Exception] = []
        self.asked: list[int] = []

    def size(self, pool: str) -> PoolSize:
        return self.known

    def set_desired(self, pool: str, size: int) -> None:
        check_bounds(pool, size, self.known)
        self.asked.append(size)
        if self.failures:
            raise self.failures.pop(0)
        self.known = msgspec.structs.replace(self.known, desired=size, live=size, settled=True)


class World:
    def __init__(self, *groups: Group, targets: Targets = TARGETS) -> None:
        self.groups = groups or (Group(),)
        self.now, self.trouble = 100.0, list[str | None]()
        self.away: str | None = None
        self.load, self.unplaced, self.ready = IDLE, IDLE, 9.0
        names = ["a", "b"][: len(self.groups)]
        pools = [ScaledPool(name, group, targets) for name, group in zip(names, self.groups, strict=True)]
        self.scaler = Autoscaler(pools, self.picture, self.why, lambda: self.now)

    def picture(self) -> LoadSnapshot:
        if self.away:
            raise LoadUnknown(self.away)
        return LoadSnapshot({"a": PoolView(self.load, self.ready)}, self.unplaced)

    def why(self) -> str | None:
        return self.trouble.pop(0) if self.trouble else None

    def round(self, seconds: float = 2.0, *, once: bool = False) -> list[tuple[str, int | None, int | None]]:
        self.now += seconds
        self.decided = self.scaler.round(once=once)
        return [(entry.action, entry.size, entry.wanted) for entry in self.decided]


def test_it_grows_and_shrinks_with_the_load() -> None:
    world = World()
    world.load = load(0.9)
    assert world.round() == [("set", 1, 2)]
    assert world.round() == [("none", 2, 2)]
    world.load = load(0.2)
    assert [world.round(4.0)[0] for _ in range(4)] == [
        ("none", 2, 2), ("none", 2, 2), ("set", 2, 1), ("none", 1, 1),
    ]  # fmt: skip
    assert world.groups[0].asked == [2, 1]


def test_who_does_not_lead_does_nothing() -> None:
    world = World()
    world.load = load(5.0)
    world.trouble = ["another leads"]
    assert world.round() == [("held", None, None)]
    assert world.decided[0].reason == "another leads"
    assert world.groups[0].asked == []


def test_who_loses_the_lease_while_it_looks_does_nothing_either() -> None:
    world = World()
    world.load = load(5.0)
    world.trouble = [None, "the lease was lost"]
    assert world.round() == [("held", 1, 2)]
    assert world.groups[0].asked == []
    assert world.round() == [("set", 1, 2)]


@pytest.mark.parametrize(("gap", "after"), [(4.0, ("set", 2, 1)), (GAP_SECONDS + 1, ("none", 2, 2))])
def test_without_the_gateway_sizes_stay(gap: float, after: tuple[str, int, int]) -> None:
    """Idle before and after: a short gap is taken for idle too, a long one may have been anything."""
    world = World(Group(desired=2))
    assert [world.round()[0][0] for _ in range(4)] == ["none"] * 4
    world.away = "the gateway does not answer"
    assert world.round(0.0) == [("held", None, None)]
    assert world.decided[0].reason == "the gateway does not answer"
    world.away = None
    assert world.round(gap) == [after]


def test_no_more_nodes_while_those_that_were_asked_for_start() -> None:
    world = World()
    world.load, world.ready = load(0.9), 1.0
    assert world.round() == [("set", 1, 2)]
    world.load = load(5.0, queue_wait=60.0)
    assert world.round() == [("none", 2, 2)]
    assert "1 of 2 are ready so far" in world.decided[0].reason
    assert world.round(START_SECONDS) == [("set", 2, 3)], "not for ever"


def test_who_waits_for_a_node_that_starts_does_not_ask_for_another() -> None:
    """Nor does it that a promise was broken meanwhile; if later ones are, too, it does."""
    world = World(Group(desired=0), targets=msgspec.structs.replace(TARGETS, up_seconds=15.0))
    world.unplaced, world.ready = load(0.0, queue_wait=30.0), 0.0
    assert world.round() == [("set", 0, 1)]
    assert [world.round() for _ in range(30)] == [[("none", 1, 1)]] * 30
    assert world.decided[0].reason == "a queue wait of 30.0 s; 0 of 1 are ready so far"
    world.unplaced, world.ready, world.load = IDLE, 1.0, load(0.1, attainment=0.0)
    moves = [world.round()[0] for _ in range(8)]
    assert moves == [("none", 1, 1)] * 7 + [("set", 1, 2)]


def test_a_throttled_or_draining_driver_is_asked_again_at_once() -> None:
    world = World(Group(desired=1))
    world.load = load(0.9)
    world.groups[0].failures = [Deferred("was throttled"), Deferred("requests are open on a-2")]
    assert [world.round()[0] for _ in range(3)] == [("waits", 1, 2), ("waits", 1, 2), ("set", 1, 2)]


def test_a_driver_that_fails_is_left_alone_for_a_while() -> None:
    world = World()
    world.load = load(0.9)
    world.groups[0].failures = [InfraError("the permission is missing")]
    assert world.round() == [("held", 1, 2)]
    assert "the permission is missing" in world.decided[0].reason
    assert world.round(FIRST_PAUSE_S / 2) == [("waits", 1, 2)]
    assert world.round(FIRST_PAUSE_S / 2) == [("set", 1, 2)]
    assert world.groups[0].asked == [2, 2]


def test_what_is_missing_is_made_even_if_the_size_stays() -> None:
    world = World()
    world.load = load(0.3)
    world.groups[0].known = msgspec.structs.replace(world.groups[0].known, settled=False)
    assert world.round() == [("set", 1, 1)]
    assert world.groups[0].asked == [1]


def test_a_single_round_makes_no_pool_smaller() -> None:
    world = World(Group(desired=2))
    assert world.round(once=True) == [("none", 2, 2)]
    world.load = load(1.4)
    assert world.round(once=True) == [("set", 2, 3)]


def test_what_no_node_takes_is_for_the_first_pool_with_room() -> None:
    world = World(Group(desired=3), Group(desired=0))
    world.unplaced = load(0.0, queue_wait=3.0)
    assert world.round() == [("none", 3, 3), ("set", 0, 1)]
    other = World(Group(desired=0), Group(desired=0))
    other.unplaced = load(0.0, queue_wait=3.0)
    assert other.round() == [("set", 0, 1), ("none", 0, 0)]


def test_a_pool_whose_size_is_unknown_holds_up_no_other() -> None:
    world = World(Group(), Group(desired=0))

    def fail(pool: str) -> PoolSize:
        raise InfraError("there is no autoscaling group demo-a")

    world.groups[0].size = fail  # type: ignore[method-assign]
    world.unplaced = load(0.0, queue_wait=3.0)
    assert world.round() == [("held", None, None), ("set", 0, 1)]


@pytest.fixture
def service(make_group: MakeGroup) -> str:
    """A service with the group of a pool `a` at moto's server, 0 to 3 instances."""
    return make_group("a", 0, 3)


def test_a_group_in_aws_from_none_to_some_and_back(service: str, s3_endpoint: str, tmp_path: Path) -> None:
    driver = RecordingDriver(AwsDriver(service, REGION, s3_endpoint), tmp_path, lambda _: 1)
    world = World(driver)  # type: ignore[arg-type]
    world.unplaced = load(0.0, queue_wait=3.0)
    assert world.round() == [("set", 0, 1)]
    world.unplaced, world.load = IDLE, load(0.9)
    assert world.round() == [("set", 1, 2)]
    assert read_sizes(tmp_path) == {"a": SetSize(2, 1)}
    world.load = IDLE
    moves = [world.round(4.0)[0] for _ in range(8)]
    assert [move for move in moves if move[0] == "set"] == [("set", 2, 1), ("set", 1, 0)]
    assert driver.size("a").desired == 0
    assert read_sizes(tmp_path) == {"a": SetSize(0, 1)}


class Slow(Group):
    """Takes long to change."""

    def __init__(self, world_of: Callable[[], World]) -> None:
        super().__init__()
        self.world_of = world_of

    def set_desired(self, pool: str, size: int) -> None:
        super().set_desired(pool, size)
        self.world_of().now += GAP_SECONDS + 1


def test_while_a_pool_is_changed_nothing_is_seen_of_others() -> None:
    """`b` was idle before and is idle after, and may have been anything meanwhile."""
    made: list[World] = []
    world = World(Slow(lambda: made[0]), Group(desired=2))
    made.append(world)
    assert [world.round()[1] for _ in range(4)] == [("none", 2, 2)] * 4
    world.load = load(0.9)
    assert world.round() == [("set", 1, 2), ("none", 2, 2)]
    assert world.round() == [("none", 2, 2), ("none", 2, 2)]
    assert world.round(11.0)[1] == ("set", 2, 1), "seen for long enough since"


class Dying(AwsDriver):
    """Whose process ends as soon as AWS has the size."""

    def set_desired(self, pool: str, size: int) -> None:
        super().set_desired(pool, size)
        raise KeyboardInterrupt


def test_a_size_that_was_set_and_not_noted_is_noted_by_the_next(service: str, s3_endpoint: str, tmp_path: Path) -> None:
    """Else the next `garnish infra plan` would undo it."""
    first, second = (
        RecordingDriver(kind(service, REGION, s3_endpoint), tmp_path, lambda _: 1) for kind in (Dying, AwsDriver)
    )
    second.set_desired("a", 1)
    with pytest.raises(KeyboardInterrupt):
        first.set_desired("a", 3)
    assert second.size("a").desired == 3
    assert read_sizes(tmp_path) == {"a": SetSize(3, 1)}
    edited = RecordingDriver(AwsDriver(service, REGION, s3_endpoint), tmp_path, lambda _: 2)
    AwsDriver(service, REGION, s3_endpoint).set_desired("a", 2)
    assert edited.size("a").desired == 2
    assert read_sizes(tmp_path) == {"a": SetSize(3, 1)}, "who has edited the file meant it"
