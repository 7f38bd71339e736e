"""Compaction of usage against a plain sum: crashes, several compactors, readers and late writers at every step."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import product, takewhile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from usage_worlds import (
    FIRST,
    GATEWAYS,
    NOW,
    SOME,
    Call,
    Crash,
    Stage,
    Told,
    Watched,
    Writer,
    age,
    calls,
    compact,
    copy_of,
    crash_at,
    levels,
    local,
    now_of,
    told,
)

from adapters.local_store import LocalStore
from adapters.store import ObjectStore
from gateway.usage.hours import HOUR, hour_name
from tests.support.draws import draws

pytestmark = pytest.mark.usefixtures("worlds_end_with_the_test", "one_reader")


def test_hours_become_days_and_days_months(store: ObjectStore) -> None:
    writer = Writer(store)
    writer.write(SOME)
    if isinstance(store, LocalStore):
        age(store)
        assert compact(store, FIRST + 2 * HOUR) == 2
        assert levels(store) == {"hours": 4, "days": 1}, "two closed hours; the day goes on"
        assert told(store) == writer.sums
        assert compact(store) == 3 + 3
        assert levels(store) == {"hours": 1, "months": 2}, "the last hour ended less than CLOSED_SECONDS ago"
        assert compact(store) == 0
    compact(store, now_of(store) + HOUR)
    assert told(store) == writer.sums
    compact(store, now_of(store) + 24 * HOUR)
    assert levels(store) == {"months": 2}
    assert told(store) == writer.sums
    part = told(store, FIRST + HOUR, FIRST + 40 * HOUR)
    inside = {hour_name(FIRST + hours * HOUR) for hours in range(1, 40)}
    assert part == {key: number for key, number in writer.sums.items() if key[0] in inside}


def operations(store: ObjectStore, now: float) -> int:
    """Of a compaction that nothing disturbs."""
    names: list[str] = []
    compact(Watched(store, names.append), now)
    return len(names)


@settings(max_examples=draws(6))
@given(made=calls)
def test_a_crash_before_or_after_any_operation_changes_no_sum(made: list[Call]) -> None:
    world, writer = local(made)
    for number in range(operations(copy_of(world), NOW)):
        for hook in ("before", "after"):
            store = copy_of(world)
            with pytest.raises(Crash):
                compact(Watched(store, **{hook: crash_at(number)}))
            assert told(store) == writer.sums
            age(store)
            compact(store)
            assert told(store) == writer.sums
            assert "days" not in levels(store)
            shutil.rmtree(store.root.parent)
    shutil.rmtree(world.root.parent)


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_crash_on_s3(new_s3_store: Callable[[], ObjectStore], step: int) -> None:
    now, number, ended = time.time() + HOUR, 0, False
    while not ended:
        store = new_s3_store()
        writer = Writer(store)
        writer.write(SOME[:5])
        try:
            hook = "after" if number % 2 else "before"
            compact(Watched(store, **{hook: crash_at(number)}), now)
            ended = True
        except Crash:
            assert told(store) == writer.sums
        compact(store, now)
        assert told(store) == writer.sums
        assert levels(store) == {"months": 2}
        number += step
    assert number > 20


def test_a_reader_at_any_moment(store: ObjectStore) -> None:
    """After each operation of a compaction; and a compaction after each operation of a reader."""
    writer = Writer(store)
    writer.write(SOME)
    if isinstance(store, LocalStore):
        age(store)
    before = copy_of(store) if isinstance(store, LocalStore) else None

    def look(_: str) -> None:
        assert told(store) == writer.sums

    compact(Watched(store, look, look), now_of(store))
    if before is None:
        return
    reads: list[str] = []
    told(Watched(before, reads.append))  # type: ignore[arg-type]
    for number in range(len(reads)):
        moved, passed = copy_of(before), Counter[str]()

        def meanwhile(_: str, moved: LocalStore = moved, passed: Counter[str] = passed, number: int = number) -> None:
            if passed.total() == number:
                compact(moved)
            passed["reads"] += 1

        assert told(Watched(moved, meanwhile)) == writer.sums  # type: ignore[arg-type]


@given(
    made=calls,
    later=st.lists(st.lists(calls, max_size=2), min_size=1, max_size=2),
    choices=st.lists(st.integers(0, 3), max_size=150),
)
def test_compactors_readers_and_a_late_writer_interleaved(
    made: list[Call], later: list[list[list[Call]]], choices: list[int]
) -> None:
    world, writer = local(made)
    stage = Stage(choices)

    def write() -> None:
        writer.store = stage.store(world, 3)
        for some in later:
            for one in some:
                writer.write(one, late=True)

    def read() -> None:
        for _ in range(2):
            before = Counter(writer.sums)
            found = told(stage.store(world, 2))
            assert all(before[key] <= found[key] for key in before), "each call that was written before"
            seen.append(found)

    seen: list[Told] = []
    stage.play(lambda: compact(stage.store(world, 0)), lambda: compact(stage.store(world, 1)), read, write)
    assert all(found[key] <= writer.sums[key] for found in seen for key in found), "and none twice"
    assert told(world) == writer.sums
    age(world)
    compact(world)
    assert told(world) == writer.sums
    shutil.rmtree(world.root.parent)


@settings(max_examples=draws(5))
@given(made=calls, later=calls, choices=st.lists(st.integers(0, 3), max_size=150))
def test_interleaved_on_s3(
    new_s3_store: Callable[[], ObjectStore], made: list[Call], later: list[Call], choices: list[int]
) -> None:
    world = new_s3_store()
    writer, now, stage = Writer(world), time.time() + HOUR, Stage(choices)
    writer.write(made)

    def write() -> None:
        writer.store = stage.store(world, 2)
        writer.write(later, late=True)

    stage.play(lambda: compact(stage.store(world, 0), now), lambda: compact(stage.store(world, 1), now), write)
    assert told(world) == writer.sums
    compact(world, now)
    assert told(world) == writer.sums


def test_every_single_interruption_by_a_second_compactor() -> None:
    """Which runs to its end at one step of the first one, and by a writer that comes between."""
    world, _ = local(SOME)
    for number in range(operations(copy_of(world), NOW)):
        store = copy_of(world)
        writer, passed = Writer(store), Counter[str]()
        writer.write(SOME)
        age(store)

        def meanwhile(_: str, store=store, writer=writer, passed=passed, number=number) -> None:  # type: ignore[no-untyped-def]
            if passed.total() == number:
                writer.write([(0, GATEWAYS[0], "f", "1", 7), (30, GATEWAYS[3], "g", "2", 1)])
                compact(store)
            passed["steps"] += 1

        compact(Watched(store, meanwhile))
        assert told(store) == writer.sums
        age(store)
        compact(store)
        assert told(store) == writer.sums
        shutil.rmtree(store.root.parent)


def test_a_second_compactor_that_dies_half_way_while_the_first_one_works() -> None:
    """What it has put into a day that is about to be removed is not removed with it."""
    first, second = (0, GATEWAYS[0], "f", "1", 1), (1, GATEWAYS[1], "f", "1", 2)
    world, writer = local([first])
    compact(world, FIRST + 3 * HOUR)  # into the day, which goes on
    assert levels(world) == {"days": 1}
    both = copy_of(world)
    Writer(both).write([second])
    age(both)
    for number, crash in product(range(operations(copy_of(world), NOW)), range(operations(both, NOW))):
        store, passed = copy_of(world), Counter[str]()
        writer = Writer(store)
        writer.sums["2021-01-30T00", "f", "1"] = 1

        def meanwhile(_: str, store=store, writer=writer, passed=passed, number=number, crash=crash) -> None:  # type: ignore[no-untyped-def]
            if passed.total() == number:
                writer.write([second])
                age(store)
                with suppress(Crash):
                    compact(Watched(store, crash_at(crash)))
            passed["steps"] += 1

        compact(Watched(store, meanwhile))
        assert told(store) == writer.sums
        compact(store)
        assert told(store) == writer.sums
        assert levels(store) == {"months": 1}
        shutil.rmtree(store.root.parent)


FORKS = """
import os, signal, sys
from pathlib import Path
from usage_worlds import compact
from adapters.local_store import LocalStore

store = LocalStore(Path(sys.argv[1]))
while sys.stdin.readline():
    child = os.fork()
    if not child:
        os.write(1, b"ready\\n")
        while compact(store):
            pass
        os.write(1, b"done\\n")
        os._exit(0)
    sys.stdin.readline()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.write(1, b"killed\\n")
"""
"""Begins a process that compacts at each odd line, and kills it at each even one."""


def test_kill_9_again_and_again(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "registry")
    writer = Writer(store)
    made = [(hours, gateway, "f", "1", hours + 1) for hours in range(0, 100, 2) for gateway in GATEWAYS]
    writer.write(made)
    age(store)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.getcwd(), str(Path(__file__).parent)])}
    command, pipe = [sys.executable, "-c", FORKS, str(store.root)], subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True, bufsize=1) as forks:
        assert forks.stdin is not None and forks.stdout is not None
        for number in range(40):
            forks.stdin.write("begin\n")
            assert forks.stdout.readline() == "ready\n"
            time.sleep(0.02 * number)
            forks.stdin.write("kill\n")
            has_ended = "done\n" in takewhile(lambda line: line != "killed\n", forks.stdout)
            assert told(store) == writer.sums
            if has_ended:
                break
        forks.stdin.close()
    compact(store)
    assert levels(store) == {"months": 2}
    assert told(store) == writer.sums
