"""Folder of one process, which goes with it: the next process that starts removes what a killed one has left."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

PREFIX = "garnish-vllm-"
"""Beginning of the folders' names."""


class OwnFolder:
    """New folder with mode 0700 below `parent`. A lock marks it as used until this process ends."""

    def __init__(self, parent: Path) -> None:
        """Removes the folders of processes that have ended. Raises OSError if `parent` can't be written."""
        _remove_unused(parent)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            if self.path.exists():  # otherwise another process that starts removed it before it was locked
                return
            os.close(self._descriptor)

    def close(self) -> None:
        """Removes the folder with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._descriptor)


def keep_temporary_files_in(folder: Path) -> None:
    """Makes this process, and those that it starts, put temporary files into the folder. vLLM leaves sockets and files
    of its processes' meetings there when it is killed."""
    tempfile.tempdir = str(folder)
    os.environ["TMPDIR"] = os.environ["VLLM_RPC_BASE_PATH"] = str(folder)


def _remove_unused(parent: Path) -> None:
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
