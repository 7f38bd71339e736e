"""Small file systems of their own, which tests fill up or make read-only. They need the right to mount."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest

Kind = Literal["tmpfs", "ext4"]
BALLAST = "ballast"
CHUNK = 64 << 10


class SmallDisk:
    """A mounted file system at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self) -> None:
        """Writes a file until not a byte fits any more. What others write meanwhile takes its room from it."""
        with (self.path / BALLAST).open("ab", buffering=0) as file:
            for size in (CHUNK, 4096, 1):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError:
                    continue

    def free(self) -> None:
        (self.path / BALLAST).unlink(missing_ok=True)

    @contextmanager
    def read_only(self) -> Iterator[None]:
        """Whatever is opened meanwhile is on a read-only file system. Files that are open already can be written."""
        _run("mount", "--bind", str(self.path), str(self.path))
        try:
            _run("mount", "-o", "remount,ro,bind", str(self.path))
            yield
        finally:
            _run("umount", "--lazy", str(self.path))


@contextmanager
def small_disk(folder: Path, kind: Kind, megabytes: int) -> Iterator[SmallDisk]:
    """Mounts a new file system in `folder`; skips the test where that is not allowed."""
    path = folder / "disk"
    path.mkdir(parents=True)
    if kind == "tmpfs":
        command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=700", "tmpfs", str(path)]
    else:
        image = folder / "image"
        with image.open("wb") as file:
            file.truncate(megabytes << 20)
        # -m 0: root, as which tests run, may use reserved blocks
        _run("mkfs.ext4", "-q", "-m", "0", str(image))
        command = ["mount", "-o", "loop", str(image), str(path)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, timeout=60, check=False).returncode:
        pytest.skip(f"no {kind} can be mounted here")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], capture_output=True, timeout=60, check=False)


def _run(*command: str) -> None:
    subprocess.run(command, capture_output=True, timeout=60, check=True)
