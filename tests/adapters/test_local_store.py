"""What is special to the directory store: modes and crashes."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from adapters.errors import StoreUnavailable
from adapters.local_store import LocalStore

HANG_IN_WRITE = """
import os, sys
from pathlib import Path
from adapters.local_store import LocalStore
store = LocalStore(Path(sys.argv[1]))
os.mkfifo(sys.argv[2])
store.put_if_absent("big/object", Path(sys.argv[2]))
"""


def test_only_the_owner_may_read(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        store = LocalStore(tmp_path / "root")
        store.put_if_absent("a/b/c", b"x")
        store.put("a/d", b"x")
    finally:
        os.umask(old)
    for path in [store.root, *store.root.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_a_writer_killed_midway_leaves_nothing_visible_and_its_file_is_swept(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    worker = subprocess.Popen([sys.executable, "-c", HANG_IN_WRITE, str(tmp_path / "store"), str(fifo)])
    try:
        while not fifo.exists():
            assert worker.poll() is None
        with fifo.open("wb") as feed:  # opens once the worker reads: it is in the middle of its write
            feed.write(b"half")
            feed.flush()
            temporary = _await_file(tmp_path / "store" / ".tmp")
            _age(temporary)
            LocalStore(tmp_path / "store")
            assert temporary.exists(), "a living writer keeps its file, however old"
            worker.send_signal(signal.SIGKILL)
            worker.wait(timeout=30)
    finally:
        worker.kill()
        worker.wait(timeout=30)
    store = LocalStore(tmp_path / "store")
    assert store.head("big/object") is None
    assert store.list("") == ()
    assert not temporary.exists()


def test_failures_of_the_disk_are_typed_and_name_no_path(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    store.put_if_absent("folder/object", b"x")
    with pytest.raises(StoreUnavailable) as raised:
        store.put("folder", b"a folder is in the way")
    assert str(tmp_path) not in str(raised.value)
    with pytest.raises(StoreUnavailable):
        store.put_if_absent("folder/object/below", b"an object is in the way")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreUnavailable):
        LocalStore(tmp_path / "file")
    assert list((store.root / ".tmp").iterdir()) == []


def _await_file(folder: Path) -> Path:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        files = list(folder.iterdir())
        if files:
            return files[0]
    raise AssertionError("no temporary file appeared")


def _age(path: Path) -> None:
    os.utime(path, (time.time() - 3600, time.time() - 3600))


def test_a_vanished_store_is_not_an_empty_one(tmp_path: Path) -> None:
    """An unmounted registry must not look as if every function had been deleted."""
    store = LocalStore(tmp_path / "root")
    store.put_if_absent("a/b", b"x")
    (tmp_path / "root").rename(tmp_path / "elsewhere")
    (tmp_path / "root").mkdir()  # the mount point remains
    for call in (lambda: store.get("a/b"), lambda: store.head("a/b"), lambda: store.list("a/")):
        with pytest.raises(StoreUnavailable, match="missing"):
            call()
    (tmp_path / "root").rmdir()
    (tmp_path / "elsewhere").rename(tmp_path / "root")
    assert store.get("a/b").data == b"x"


NEIGHBOURS = """
import multiprocessing, sys
from pathlib import Path
from adapters.local_store import LocalStore

fork = multiprocessing.get_context("fork")
start = fork.Barrier(4)

def write(mine):
    store = LocalStore(Path(sys.argv[1]))
    start.wait(60)
    for number in range(150):
        data = str(number).encode()
        if number % 2:
            store.put(mine, data)
        else:
            store.put_if_absent(mine, data)
        assert store.get(mine).data == data
        if number < 149:
            store.delete(mine)

with fork.Pool(4) as pool:  # a process for each
    pool.map(write, [f"a/b/{number}" for number in range(4)], 1)
"""


def test_folders_that_get_empty_are_removed_and_no_writer_stumbles_over_that(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "registry")
    subprocess.run([sys.executable, "-c", NEIGHBOURS, str(store.root)], timeout=240, check=True)
    assert [info.key for info in store.list("")] == [f"a/b/{number}" for number in range(4)]
    for number in range(4):
        store.delete(f"a/b/{number}")
    assert not (store.root / "a").exists()
    store.put("a/c", b"1")
    store.put("a/b/c", b"2")
    assert store.delete_older("a/b/c", time.time() + 60)
    assert [path.name for path in (store.root / "a").iterdir()] == ["c"]
