"""Warm windows against a reference that looks at every minute; and the list of functions that have some."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from pathlib import Path

import pytest

from adapters import schedules
from adapters.errors import Conflict, InvalidRequest
from adapters.functions import Policy, parse_policy
from adapters.local_store import LocalStore
from adapters.schedules import forget_schedules, read_schedules, record_schedule
from adapters.warm_windows import WarmWindow, window_state

MINUTE, DAY = 60, 86400


def numbers(field: str, low: int, high: int) -> set[int]:
    """What one field of a cron expression names: `*`, lists, ranges, steps."""
    found: set[int] = set()
    for part in field.split(","):
        span, _, step = part.partition("/")
        first, _, last = span.partition("-")
        values = range(low, high + 1) if span == "*" else range(int(first), int(last or first) + 1)
        found.update(list(values)[:: int(step or 1)])
    return found


def names(cron: str, when: datetime) -> bool:
    minute, hour, day, month, weekday = cron.split()
    on_day = when.day in numbers(day, 1, 31)
    on_weekday = when.isoweekday() % 7 in {number % 7 for number in numbers(weekday, 0, 7)}
    either = day != "*" and weekday != "*"
    return (
        when.minute in numbers(minute, 0, 59)
        and when.hour in numbers(hour, 0, 23)
        and when.month in numbers(month, 1, 12)
        and ((on_day or on_weekday) if either else (on_day and on_weekday))
    )


def is_open(window: WarmWindow, now: int) -> bool:
    """Whether any minute within the window's length names it."""
    first = (now - window.seconds) // MINUTE * MINUTE + MINUTE
    return any(names(window.cron, datetime.fromtimestamp(at, UTC)) for at in range(first, now + 1, MINUTE))


def draw_field(rng: random.Random, low: int, high: int) -> str:
    match rng.randrange(5):
        case 0 | 1:
            return "*"
        case 2:
            return str(rng.randint(low, high))
        case 3:
            first = rng.randint(low, high)
            return f"{first}-{rng.randint(first, high)}"
        case _:
            return ",".join(str(number) for number in sorted(rng.sample(range(low, high + 1), 2)))


def test_windows_open_and_close_as_each_minute_says() -> None:
    rng, opened = random.Random(7), 0
    for _ in range(60):
        fields = [(0, 59), (0, 23), (1, 28), (1, 12), (0, 6)]
        window = WarmWindow(" ".join(draw_field(rng, *field) for field in fields), rng.randint(60, DAY // 2))
        now = rng.randint(1_750_000_000, 1_800_000_000)
        found, until = window_state(window, now)
        assert found == is_open(window, now), (window, now)
        opened += found
        for later in {now, int(until) - 1, rng.randint(now, max(now, int(until) - 1))}:
            if later - now < DAY:
                assert is_open(window, later) == found, (window, now, later)
    assert 6 < opened < 54, "both are drawn"


@pytest.mark.parametrize("offset", [-61, -60, -1, 0, 1, 599, 600, 601])
def test_the_edges_of_a_window(offset: int) -> None:
    nine = int(datetime(2026, 3, 2, 9, tzinfo=UTC).timestamp())
    assert window_state(WarmWindow("0 9 * * *", 600), nine + offset)[0] == (0 <= offset < 600)


@pytest.mark.parametrize(
    ("window", "param"),
    [
        ({"cron": "0 9 * *  ", "for": 600}, "warm[0].cron"),
        ({"cron": "0 25 * * *", "for": 600}, "warm[0].cron"),
        ({"cron": "0 9 30 2 *", "for": 600}, "warm[0].cron"),
        ({"cron": "* * * * * *", "for": 600}, "warm[0].cron"),
        ({"cron": "@daily", "for": 600}, "warm[0].cron"),
        ({"cron": "0 9 * * *" + " " * 200, "for": 600}, "warm[0].cron"),
        ({"cron": 9, "for": 600}, "warm[0].cron"),
        ({"cron": "0 9 * * *"}, "warm[0]"),
        ({"cron": "0 9 * * *", "for": 1}, "warm[0].for"),
        ({"cron": "0 9 * * *", "for": 1e9}, "warm[0].for"),
        ({"cron": "0 9 * * *", "for": 600, "copies": 0}, "warm[0].copies"),
        ({"cron": "0 9 * * *", "for": 600, "nodes": 2}, "warm[0]"),
    ],
)
def test_what_is_no_window_is_refused_by_name(window: dict, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_policy({"warm": [window]}, Policy(), within="")
    assert refused.value.param == param
    with pytest.raises(InvalidRequest):
        parse_policy({"warm": [{"cron": "0 9 * * *", "for": 600}] * 9}, Policy())


def test_a_function_is_taken_off_the_list_when_no_writer_can_be_about_to_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, now = LocalStore(tmp_path), 1e9
    monkeypatch.setattr(LocalStore, "now", lambda _: now)
    for name in ("f", "g"):
        record_schedule(store, "acme", name)
    now += schedules.SETTLED_SECONDS - 1
    forget_schedules(store, ["acme/f", "acme/h"])
    assert set(read_schedules(store).functions) == {"acme/f", "acme/g"}
    record_schedule(store, "acme", "f")
    now += 2
    forget_schedules(store, ["acme/f", "acme/g"])
    assert set(read_schedules(store).functions) == {"acme/f"}, "that one was noted again"


def test_the_list_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "MAX_TENANT_SCHEDULED", 2)
    monkeypatch.setattr(schedules, "MAX_SCHEDULED", 3)
    store = LocalStore(tmp_path)
    for name in ("f", "g", "f"):
        record_schedule(store, "acme", name)
    with pytest.raises(Conflict):
        record_schedule(store, "acme", "h")
    record_schedule(store, "other", "f")
    with pytest.raises(Conflict):
        record_schedule(store, "third", "f")
