"""Usage as gateways leave it in a store, what it sums up to, and a store whose every operation can be watched."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import strategies as st

from adapters.local_store import LocalStore
from adapters.store import ObjectStore
from gateway.leader.tick import Tick
from gateway.usage.compaction import compact_tenant
from gateway.usage.counts import Functions, UsageCounts, add_to
from gateway.usage.hours import HOUR, hour_name, hour_start
from gateway.usage.objects import UsageRecord, usage_folder, usage_key
from gateway.usage.report import read_usage

TENANT = "acme"
FIRST = hour_start("2021-01-30T00")
"""So that a few days lie in two months."""
NOW = FIRST + 6 * 24 * HOUR
GATEWAYS = [f"{number:016x}" for number in range(1, 5)]
Told = Counter[tuple[str, str, str]]
"""Calls by hour, function and version."""

call = st.tuples(
    st.integers(0, 5 * 24 - 1),  # hours after FIRST; of days that are over at NOW
    st.sampled_from(GATEWAYS[:3]),
    st.sampled_from("fg"),
    st.sampled_from(["1", "base"]),
    st.integers(1, 9),
)
calls = st.lists(call, min_size=1, max_size=12)
Call = tuple[int, str, str, str, int]


SOME: list[Call] = [
    (0, GATEWAYS[0], "f", "1", 1),
    (0, GATEWAYS[1], "f", "1", 2),
    (1, GATEWAYS[0], "f", "base", 3),
    (30, GATEWAYS[0], "g", "1", 4),
    (50, GATEWAYS[2], "f", "1", 5),
    (5 * 24 + 23, GATEWAYS[0], "f", "1", 6),
]
"""Two months, several days, an hour that is not closed yet at NOW."""


class Writer:
    """All gateways of a tenant. Objects are cumulative, and written whole, as the ledger's are."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self.sums: Told = Counter()
        self._functions: dict[tuple[str, str], Functions] = {}
        self._changes: Counter[tuple[str, str]] = Counter()

    def write(self, made: Sequence[Call], *, late: bool = False) -> None:
        touched = set()
        for hours, gateway, function, version, number in made:
            hour = hour_name(FIRST + hours * HOUR)
            add_to(self._functions.setdefault((hour, gateway), {}), function, version, counts(number))
            self._changes[hour, gateway] += 1
            touched.add((hour, gateway))
        for hour, gateway in sorted(touched):
            key = usage_key(TENANT, hour, gateway, 1, self._changes[hour, gateway] if late else None)
            self.store.put(key, msgspec.json.encode(UsageRecord(self._functions[hour, gateway])))
            for hours, whose, function, version, number in made:
                if (hour_name(FIRST + hours * HOUR), whose) == (hour, gateway):
                    self.sums[hour, function, version] += number


def counts(number: int) -> UsageCounts:
    return UsageCounts(number, 2 * number, 3 * number, number % 2)


def told(store: ObjectStore, first: int = FIRST, end: int = NOW) -> Told:
    sums: Told = Counter()
    for cell, found in read_usage(store, TENANT, first, end, {}):
        assert (found.prompt_tokens, found.completion_tokens) == (2 * found.requests, 3 * found.requests)
        sums[cell.hour, cell.function, cell.version] += found.requests
    return sums


def age(store: LocalStore) -> None:
    """What lies there was written long ago."""
    for path in (store.root / usage_folder(TENANT)).rglob("*.json"):
        os.utime(path, (1e9, 1e9))


def tick() -> Tick:
    return Tick(1.0, lambda: 0.0, lambda: True)


def compact(store: Any, now: float = NOW) -> int:
    """Returns how many objects were removed."""
    given = tick()
    compact_tenant(store, TENANT, now, given)
    return given.work


def levels(store: ObjectStore) -> Counter[str]:
    """How many objects there are of each kind."""
    keys = [info.key.removeprefix(usage_folder(TENANT)) for info in store.list(usage_folder(TENANT))]
    return Counter("hours" if key[0].isdigit() else key.partition("/")[0] for key in keys)


class Watched:
    """A store, each of whose operations calls `before` and `after` with its name."""

    readers = 1

    def __init__(
        self,
        store: ObjectStore,
        before: Callable[[str], None] = lambda _: None,
        after: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._store, self._before, self._after = store, before, after

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._store, name)

        def run(*args: Any) -> Any:
            self._before(name)
            result = operation(*args)
            self._after(name)
            return result

        return run


class Crash(BaseException):
    """The process ends here."""


def crash_at(number: int) -> Callable[[str], None]:
    """Raises Crash when it is called for the `number`th time, counted from 0, and ever after."""
    calls = 0

    def hook(_: str) -> None:
        nonlocal calls
        calls += 1
        if calls > number:
            raise Crash

    return hook


class Stage:
    """Actors in threads, one of which at a time takes one step: an operation of the store."""

    def __init__(self, choices: Sequence[int]) -> None:
        self._choices = list(choices)
        self._waiting: dict[int, threading.Event] = {}
        self._changed = threading.Condition()
        self._running = 0
        self.errors: list[BaseException] = []

    def store(self, store: ObjectStore, actor: int) -> Any:
        return Watched(store, lambda _: self._wait(actor))

    def play(self, *actors: Callable[[], object]) -> None:
        """Until all have ended. Raises what one of them raised."""
        self._running = len(actors)
        threads = [threading.Thread(target=self._act, args=(actor,), daemon=True) for actor in actors]
        for thread in threads:
            thread.start()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: len(self._waiting) == self._running)
                if not self._waiting:
                    break
                choice = self._choices.pop(0) if self._choices else 0
                chosen = sorted(self._waiting)[choice % len(self._waiting)]
                event = self._waiting.pop(chosen)
                event.set()
        for thread in threads:
            thread.join(60)
        if self.errors:
            raise self.errors[0]

    def _act(self, actor: Callable[[], object]) -> None:
        try:
            actor()
        except BaseException as error:
            self.errors.append(error)
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify()

    def _wait(self, actor: int) -> None:
        event = threading.Event()
        with self._changed:
            self._waiting[actor] = event
            self._changed.notify()
        event.wait()


def now_of(store: ObjectStore) -> float:
    """On S3 objects are as old as they are: only a later `now` finds them quiet."""
    return NOW if isinstance(store, LocalStore) else time.time() + HOUR


def local(made: list[Call]) -> tuple[LocalStore, Writer]:
    store = LocalStore(Path(tempfile.mkdtemp()) / "registry")
    writer = Writer(store)
    writer.write(made)
    age(store)
    return store, writer


def copy_of(store: LocalStore) -> LocalStore:
    folder = Path(tempfile.mkdtemp()) / "registry"
    shutil.copytree(store.root, folder)
    return LocalStore(folder)
