"""Folder of one process, with the shared memory that belongs to it. Both go with the process: the next process that
starts removes what a killed one has left."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from multiprocessing import shared_memory
from pathlib import Path

PREFIX = "garnish-vllm-"
"""Beginning of the folders' names."""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where Linux shows shared memory as files


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
        """Removes the folder with all that is in it, and its shared memory."""
        _remove(self.path)
        os.close(self._descriptor)


def keep_temporary_files_in(folder: Path) -> None:
    """Makes this process, and those that it starts, put temporary files into the folder. vLLM leaves sockets and files
    of its processes' meetings there when it is killed. Call `name_shared_memory` in the processes that it starts."""
    tempfile.tempdir = str(folder)
    os.environ["TMPDIR"] = os.environ["VLLM_RPC_BASE_PATH"] = str(folder)
    name_shared_memory(folder)


def name_shared_memory(folder: Path) -> None:
    """Makes the names of shared memory that this process creates begin with the drawn part of the folder's name.

    vLLM's queues between processes take 400 MB of it. Python's own process that removes it may be killed too, and it
    can't choose names: Python has no public setting for their beginning, which has at most 10 characters.
    """
    shared_memory._SHM_NAME_PREFIX = f"/{_memory_prefix(folder)}"  # type: ignore[attr-defined]


def _memory_prefix(folder: Path) -> str:
    return f"{folder.name.removeprefix(PREFIX)}."


def _remove_unused(parent: Path) -> None:
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(folder)
            finally:
                os.close(descriptor)


def _remove(folder: Path) -> None:
    """Removes the folder and its shared memory, which includes that of its processes' meetings: vLLM's ranks on a CPU
    name theirs after the file at which they meet."""
    prefixes = [_memory_prefix(folder), *(f"{file.name}-" for file in folder.glob("vllm_dist_*"))]
    for file in SHARED_MEMORY.iterdir():
        if file.name.startswith(tuple(prefixes)):
            with suppress(OSError):  # another user's, or another process has removed it
                file.unlink()
    shutil.rmtree(folder, ignore_errors=True)
