"""A node's and a service's files on a disk that takes nothing: none of them ends a process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from garnish.logs import bound_log, fresh_log
from node_agent.exit_note import clear_exit, read_exit, write_exit
from node_agent.supervisor import Child
from tests.node_agent.test_supervisor import config_of, end_of
from tests.support.small_disk import SmallDisk, small_disk


@pytest.fixture(params=["tmpfs", "ext4"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path, request.param, 16) as made:
        yield made


def test_the_note_of_an_exit(disk: SmallDisk, caplog: pytest.LogCaptureFixture) -> None:
    disk.fill()
    write_exit(disk.path, -9)
    assert "can't report why its engine ended" in caplog.text
    assert read_exit(disk.path) == ""
    disk.free()
    write_exit(disk.path, 3)
    with disk.read_only():
        clear_exit(disk.path)
        write_exit(disk.path, -9)
        assert "code 3" in read_exit(disk.path)


def test_a_log_that_is_too_long_gives_its_room_back(disk: SmallDisk) -> None:
    log = fresh_log(disk.path, "gateway")
    log.write_bytes(bytes(2 << 20))
    disk.fill()
    with disk.read_only():
        bound_log(log, limit=1 << 20)
    bound_log(log, limit=1 << 20)
    assert log.stat().st_size == 0
    assert not log.with_suffix(".log.1").exists()


def test_a_process_whose_log_can_t_be_opened_runs_without(disk: SmallDisk, tmp_path: Path) -> None:
    child = Child("other", "http.server", config_of(tmp_path), output=disk.path / "log")
    with disk.read_only():
        child.tend(100.0)
        assert child.pid is not None
    child.ask_to_stop()
    end_of(child)
    child.kill()
