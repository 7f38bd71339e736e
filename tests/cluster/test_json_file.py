"""Measurements of a host are kept by several processes at once: nodes that start together."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from cluster.json_file import write_json

WRITE = """
import sys
from pathlib import Path

import msgspec

from cluster.json_file import write_json

class Value(msgspec.Struct):
    numbers: list[int]

for _ in range(400):
    write_json(Value(list(range(int(sys.argv[2])))), Path(sys.argv[1]))
"""


class Value(msgspec.Struct):
    numbers: list[int]


def test_two_processes_that_write_one_file_never_leave_half_of_it(tmp_path: Path) -> None:
    file = tmp_path / "kept.json"
    write_json(Value([]), file)
    writers = [subprocess.Popen([sys.executable, "-c", WRITE, str(file), size]) for size in ("10", "5000")]
    sizes = set()
    while any(writer.poll() is None for writer in writers):
        sizes.add(len(msgspec.json.decode(file.read_bytes(), type=Value).numbers))
    assert [writer.wait() for writer in writers] == [0, 0]
    assert sizes <= {0, 10, 5000}
    assert list(tmp_path.iterdir()) == [file]


def test_what_can_not_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "kept.json").mkdir()
    with pytest.raises(OSError):
        write_json(Value([1]), tmp_path / "kept.json")
    assert [entry.name for entry in tmp_path.iterdir()] == ["kept.json"]
