from __future__ import annotations

import signal
from pathlib import Path

from node_agent.exit_note import clear_exit, describe, read_exit, write_exit


def test_the_last_note_is_read_until_it_is_cleared(tmp_path: Path) -> None:
    assert read_exit(tmp_path) == ""
    write_exit(tmp_path, 1)
    write_exit(tmp_path, -signal.SIGKILL)
    assert read_exit(tmp_path) == describe(-signal.SIGKILL)
    clear_exit(tmp_path)
    assert read_exit(tmp_path) == ""
    clear_exit(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_codes_and_signals_are_named() -> None:
    assert "exit code 3" in describe(3)
    assert "SIGKILL" in describe(-9)
    assert "signal 250" in describe(-250)
