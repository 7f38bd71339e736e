"""Upload folders of a gateway worker. Their names contain the process id, so that leftovers of killed workers can be
removed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def upload_prefix() -> str:
    """Returns the prefix of the names of this process's upload folders in `tmp_dir`."""
    return f"upload-{os.getpid()}-"


def remove_abandoned(folder: Path) -> None:
    """Creates `folder`, and removes the upload folders of processes that have exited. Must be called before the first
    upload.

    Folders with this process's id are removed as well, because an earlier process left them.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for upload in folder.glob("upload-*"):
        pid = upload.name.split("-")[1]
        if pid == str(os.getpid()) or not _lives(pid):
            shutil.rmtree(upload, ignore_errors=True)


def _lives(pid: str) -> bool:
    """Returns whether a process runs. A zombie does not: in a container without an init process, nobody reaps killed
    workers."""
    try:
        state = Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
