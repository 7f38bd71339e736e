"""The folders of a gateway worker's uploads: named after their process, so that the next one clears what a killed one
left."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def upload_prefix() -> str:
    """Returns what the names of this process's upload folders in `tmp_dir` begin with."""
    return f"upload-{os.getpid()}-"


def remove_abandoned(folder: Path) -> None:
    """Makes `folder`, and removes the upload folders of processes that no longer run, and those under this process's
    own id, which an earlier process left. To be called before the first upload; those of live workers stay."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for upload in folder.glob("upload-*"):
        pid = upload.name.split("-")[1]
        if pid == str(os.getpid()) or not _lives(pid):
            shutil.rmtree(upload, ignore_errors=True)


def _lives(pid: str) -> bool:
    """A zombie does not: in a container without an init process nobody collects those of a killed service."""
    try:
        state = Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
