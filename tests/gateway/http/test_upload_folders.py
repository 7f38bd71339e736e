"""Left-over uploads are told from those under way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from gateway.http.upload_folders import remove_abandoned, upload_prefix
from tests.gateway.running_gateway import until


def test_what_killed_processes_left_goes_and_what_others_write_stays(tmp_path: Path) -> None:
    living = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    zombie = subprocess.Popen([sys.executable, "-c", ""])  # ends, and is not collected before the test is over
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    stat = Path(f"/proc/{zombie.pid}/stat")
    until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z")
    names = {who: tmp_path / f"upload-{pid}-x" for who, pid in (("living", living.pid), ("zombie", zombie.pid))}
    names |= {"gone": tmp_path / f"upload-{gone.pid}-x", "own": tmp_path / f"{upload_prefix()}x"}
    for folder in names.values():
        folder.mkdir()
        (folder / "weights").write_bytes(b"half")
    remove_abandoned(tmp_path)
    assert list(tmp_path.iterdir()) == [names["living"]]
    assert upload_prefix() == f"upload-{os.getpid()}-"
    living.communicate(b"\n")
    zombie.wait()
    remove_abandoned(tmp_path)
    assert list(tmp_path.iterdir()) == []
