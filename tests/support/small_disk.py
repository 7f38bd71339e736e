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

    def abort(self) -> None:
        """Makes an ext4 find an error of its own: it is read-only from now on, also for files that are open."""
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
        [device] = [Path(mount[0]).name for mount in mounts if mount[1] == str(self.path)]
        Path("/sys/fs/ext4", device, "trigger_fs_error").write_text("1")

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
    with mounted(folder / "disk", kind, megabytes) as disk:
        if disk is None:
            pytest.skip(f"NOT RUN: no {kind} can be mounted here")
        yield disk


@contextmanager
def mounted(path: Path, kind: Kind, megabytes: int) -> Iterator[SmallDisk | None]:
    """Mounts a new file system on the new folder `path`. Yields None where this is not allowed."""
    path.mkdir(parents=True)
    if os.geteuid() != 0:
        yield None
        return
    if kind == "tmpfs":
        command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=700", "tmpfs", str(path)]
    else:
        image = path.with_name(f"{path.name}.image")
        with image.open("wb") as file:
            file.truncate(megabytes << 20)
        # -m 0: root, as which tests run, may use reserved blocks
        _run("mkfs.ext4", "-q", "-m", "0", str(image))
        command = ["mount", "-o", "loop,errors=remount-ro", str(image), str(path)]
    if subprocess.run(command, capture_output=True, timeout=60, check=False).returncode:
        yield None
        return
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], capture_output=True, timeout=60, check=False)


def _run(*command: str) -> None:
    subprocess.run(command, capture_output=True, timeout=60, check=True)
