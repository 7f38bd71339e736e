"""Pauses of templates that were killed: how long they are, when they end, and how much is kept of them."""

from __future__ import annotations

import sys

from adapters.functions import MAX_TEMPLATE
from gateway.calls.setbacks import FIRST_PAUSE_S, MAX_PAUSE_S, MAX_REMEMBERED, Setbacks, key_of


class World:
    def __init__(self) -> None:
        self.now = 0.0
        self.setbacks = Setbacks(lambda: self.now)

    def seconds(self, tenant: str, template: str = "loop") -> float | None:
        pause = self.setbacks.pause(key_of(tenant, template))
        return None if pause is None else pause[0]


def test_pauses_double_up_to_a_minute_and_are_of_one_tenant() -> None:
    world, seconds = World(), FIRST_PAUSE_S
    for _ in range(20):
        world.setbacks.record_kill(key_of("bad", "loop"), "why")
        assert world.seconds("bad") == seconds
        assert world.seconds("good") is world.seconds("bad", "another") is None
        seconds = min(MAX_PAUSE_S, 2 * seconds)
    world.now += MAX_PAUSE_S
    assert world.seconds("bad") is None


def test_a_success_takes_back_one_kill() -> None:
    world, key = World(), key_of("bad", "loop")
    for _ in range(2):
        world.setbacks.record_kill(key, "why")
    world.setbacks.record_success(key)
    world.setbacks.record_kill(key, "why")
    assert world.seconds("bad") == 2 * FIRST_PAUSE_S
    for _ in range(3):
        world.setbacks.record_success(key)
    assert world.seconds("bad") is None


def test_what_is_kept_is_small_however_long_and_many_the_templates() -> None:
    world = World()
    for number in range(MAX_REMEMBERED + 10):
        world.setbacks.record_kill(key_of("bad", f"{number:0{MAX_TEMPLATE}}"), "why")
    [kept] = [value for value in vars(world.setbacks).values() if isinstance(value, dict)]
    assert len(kept) == MAX_REMEMBERED
    assert max(sum(map(sys.getsizeof, key)) for key in kept) < 256
