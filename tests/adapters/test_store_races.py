"""What any object store does for many writers at once, in threads and in processes."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from adapters.errors import Conflict, PreconditionFailed
from adapters.open_store import open_store
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


CREATE = """
import sys
from adapters.errors import Conflict
from adapters.open_store import open_store
store = open_store(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
for number in range(20):
    try:
        store.put_if_absent(f"key/{number}", sys.argv[2].encode())
    except Conflict:
        continue
    print(number, flush=True)
"""

COUNT = """
import sys
from adapters.errors import PreconditionFailed
from adapters.open_store import open_store
store = open_store(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
done = 0
while done < 25:
    found = store.get("count")
    try:
        store.put_if_match("count", str(int(found.data) + 1).encode(), found.etag)
        done += 1
    except PreconditionFailed:
        pass
"""


def _race(code: str, url: str, count: int) -> list[str]:
    """Run the code in so many processes that start to work together; returns what each printed."""
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", code, url, str(number)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for number in range(count)
    ]
    try:
        for worker in workers:
            assert worker.stdout is not None and worker.stdout.readline() == "ready\n"
        outputs = []
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write("go\n")
            worker.stdin.flush()
        for worker in workers:
            outputs.append(worker.communicate(timeout=120)[0])
            assert worker.returncode == 0
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    return outputs


def test_one_of_many_processes_creates_each_object(url: str) -> None:
    won = [[int(line) for line in output.split()] for output in _race(CREATE, url, 4)]
    assert sorted(number for numbers in won for number in numbers) == list(range(20))
    store = open_store(url)
    for worker, numbers in enumerate(won):
        assert all(store.get(f"key/{number}").data == str(worker).encode() for number in numbers)


def test_no_increment_is_lost_between_processes(url: str) -> None:
    open_store(url).put_if_absent("count", b"0")
    _race(COUNT, url, 3)
    assert open_store(url).get("count").data == b"75"
