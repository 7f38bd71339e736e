"""What warm windows want now: while the registry answers, while it does not, and when their functions are gone."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from numbered_adapters import DIGESTS

from adapters import schedules as stored
from adapters.choices import Choice, Resolved
from adapters.errors import AdapterError, CorruptFunction, NoSuchFunction, NotFound, StoreUnavailable
from adapters.functions import Policy
from adapters.local_store import LocalStore
from adapters.schedules import read_schedules, record_schedule
from adapters.warm_windows import WarmWindow, window_state
from gateway.leader.tick import Tick
from gateway.residency import schedules
from gateway.residency.schedules import WarmSchedules

NINE = 1_767_603_600.0
"""2026-01-05, 9:00 UTC."""


class Threads:
    """Stands for gateway.catalog.threads.StoreThreads."""

    away = False

    async def read(self, call: Callable[..., Any], *args: Any) -> Any:
        if self.away:
            raise StoreUnavailable("away")
        return call(*args)

    write = read


class Functions:
    """Stands for gateway.catalog.functions.Functions."""

    def __init__(self, windows: dict[str, list[WarmWindow]]) -> None:
        self.windows = windows
        self.failures: dict[str, AdapterError] = {}

    async def choices(self, tenant: str, name: str, qualifier: str | None) -> list[Choice]:
        assert qualifier is None
        if name in self.failures:
            raise self.failures[name]
        if name not in self.windows:
            raise NoSuchFunction(tenant, name)
        policy = Policy(warm=self.windows[name])
        made = [Resolved(name, version, DIGESTS[version], "key", (8,), 1000, policy, 2) for version in (1, 2, 3)]
        return [Choice(0.5, made[0]), Choice(0.4, made[1]), Choice(0.1, made[2], damaged="torn")]


class World:
    def __init__(self, folder: Path, windows: dict[str, list[WarmWindow]]) -> None:
        self.store, self.threads, self.functions, self.now = LocalStore(folder), Threads(), Functions(windows), 0.0
        for name in windows:
            record_schedule(self.store, "t", name)
        self.schedules = WarmSchedules(
            self.store,
            self.threads,  # type: ignore[arg-type]
            self.functions,  # type: ignore[arg-type]
            unix=lambda: NINE + self.now,
        )

    def wanted(self, now: float) -> dict[str, list[tuple[str, int]]]:
        """By function, digests and copies."""
        self.now = now
        found: dict[str, list[tuple[str, int]]] = {}
        asyncio.run(self.schedules.check(Tick(math.inf, lambda: 0.0, lambda: True)))
        for wish in self.schedules.wishes:
            assert (wish.cause, wish.chance, wish.tier) == ("schedule", 1.0, "device")
            found.setdefault(wish.key, []).append((wish.adapter.digest, wish.copies))
        return found


def test_windows_are_opened_and_closed_in_time(tmp_path: Path) -> None:
    windows = {
        "f": [WarmWindow("1 9 * * *", 60, 2), WarmWindow("0 9 * * 1", 300, 1)],
        "g": [WarmWindow("0 9 * * 2", 300)],
        "odd": [WarmWindow("of a later release", 300)],
    }
    world = World(tmp_path, windows)
    one, two = ([(DIGESTS[1], copies), (DIGESTS[2], copies)] for copies in (1, 2))
    assert world.wanted(0.0) == {"t/f": one}, "of the versions that can be loaded"
    assert world.wanted(61.0) == {"t/f": two}, "as many as any open window asks for"
    assert world.wanted(125.0) == {"t/f": one}
    assert world.wanted(300.0) == {}
    assert world.wanted(24 * 3600.0) == {"t/g": one}


def test_a_registry_that_is_away_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    world = World(tmp_path, {"f": [WarmWindow("0 9 * * *", 3600)]})
    known = world.wanted(0.0)
    assert known
    world.threads.away = True
    assert [world.wanted(number) for number in (1.0, 2.0, 3.0)] == [known] * 3
    assert len(caplog.records) == 1


def test_functions_without_windows_are_taken_off_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "SETTLED_SECONDS", -60.0)
    world = World(tmp_path, {"f": [WarmWindow("0 9 * * *", 3600)], "g": [], "h": []})
    del world.functions.windows["h"]
    assert set(world.wanted(0.0)) == {"t/f"}
    assert set(read_schedules(world.store).functions) == {"t/f"}


def test_a_damaged_function_and_one_without_latest_hold_up_no_other_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "SETTLED_SECONDS", -60.0)
    every_hour = [WarmWindow("0 * * * *", 600)]
    world = World(tmp_path, {"damaged": every_hour, "f": every_hour, "moved": every_hour})
    world.functions.failures = {"damaged": CorruptFunction("damaged"), "moved": NotFound("it has no alias 'latest'")}
    assert set(world.wanted(0.0)) == {"t/f"}
    assert world.wanted(1200.0) == {}, "what is known does not stay as it was"
    world.functions.failures.clear()
    assert set(world.wanted(3600.0)) == {"t/damaged", "t/f", "t/moved"}


def test_windows_that_nobody_has_any_more_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def noted(window: WarmWindow, now: float) -> tuple[bool, float]:
        asked.append(window.seconds)
        return window_state(window, now)

    monkeypatch.setattr(schedules, "window_state", noted)
    world = World(tmp_path, {"f": []})
    for number, seconds in enumerate((60, 60, 90, 60)):
        world.functions.windows["f"] = [WarmWindow("0 0 29 2 *", seconds)]
        assert world.wanted(float(number)) == {}
    assert asked == [60, 90, 60]
