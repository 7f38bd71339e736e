"""What any object store does for many writers at once, in threads and in processes."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from adapters.errors import Conflict, PreconditionFailed
from adapters.store import ObjectStore

MakeStore = Callable[[], ObjectStore]


def test_one_of_many_creators_wins(make_store: MakeStore) -> None:
    start = threading.Barrier(8)

    def create(number: int) -> bool:
        store = make_store()
        start.wait(timeout=30)
        try:
            store.put_if_absent("key", str(number).encode())
        except Conflict:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(create, range(8)))
    assert won.count(True) == 1
    assert make_store().get("key").data == str(won.index(True)).encode()


def test_no_increment_is_lost_between_threads(make_store: MakeStore) -> None:
    make_store().put_if_absent("count", b"0")

    def add(times: int) -> None:
        store = make_store()
        while times:
            found = store.get("count")
            try:
                store.put_if_match("count", str(int(found.data) + 1).encode(), found.etag)
            except PreconditionFailed:
                continue
            times -= 1

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, [10] * 4))
    assert make_store().get("count").data == b"40"


RACE = """
import json, multiprocessing, sys
from adapters.errors import Conflict, PreconditionFailed
from adapters.open_store import open_store

url, work, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
if url.startswith("s3:"):
    import adapters.s3_store  # once, for all of them
fork = multiprocessing.get_context("fork")
start = fork.Barrier(count)

def create(store, mine):
    won = []
    for number in range(20):
        try:
            store.put_if_absent(f"key/{number}", str(mine).encode())
        except Conflict:
            continue
        won.append(number)
    return won

def increase(store, mine):
    done = 0
    while done < 25:
        found = store.get("count")
        try:
            store.put_if_match("count", str(int(found.data) + 1).encode(), found.etag)
            done += 1
        except PreconditionFailed:
            pass

def begin(mine):
    store = open_store(url)
    start.wait(60)
    return {"create": create, "increase": increase}[work](store, mine)

with fork.Pool(count) as pool:  # a process for each
    print(json.dumps(pool.map(begin, range(count), 1)))
"""


def race(url: str, work: str, count: int) -> list[Any]:
    """What so many processes that begin together return."""
    command = [sys.executable, "-c", RACE, url, work, str(count)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    return list(json.loads(done.stdout))


def test_one_of_many_processes_creates_each_object(url: str, make_store: MakeStore) -> None:
    won = race(url, "create", 4)
    assert sorted(number for numbers in won for number in numbers) == list(range(20))
    store = make_store()
    for worker, numbers in enumerate(won):
        assert all(store.get(f"key/{number}").data == str(worker).encode() for number in numbers)


def test_no_increment_is_lost_between_processes(url: str, make_store: MakeStore) -> None:
    make_store().put_if_absent("count", b"0")
    race(url, "increase", 3)
    assert make_store().get("count").data == b"75"
