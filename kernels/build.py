"""Compiles a C++ source of this folder for this very processor, once per user, source, compiler and processor.

Plain C++ behind a C interface: neither Python's nor torch's headers are needed, and it takes two seconds. OpenMP's
functions are left open at the link, so that they are those of the OpenMP that torch has loaded: one pool of threads.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from importlib.resources import files
from pathlib import Path

COMPILERS = ("g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-mprefer-vector-width=512", "-ffp-contract=fast", "-fPIC", "-fopenmp")
COMPILE_LIMIT_S = 120


class CompileError(RuntimeError):
    """The operator can't be had here; says why. The torch path does the same work."""


def load_library(cache: Path | None = None, name: str = "grouped_lora") -> ctypes.CDLL:
    """The compiled `name`.cpp from `cache` (None: ~/.cache/garnish), compiled first if it isn't there. Raises
    CompileError. torch must have been imported."""
    compiler = next((path for command in COMPILERS if (path := shutil.which(command))), None)
    if compiler is None:
        raise CompileError(f"no C++ compiler ({', '.join(COMPILERS)}) is installed")
    source = (files(__package__) / f"{name}.cpp").read_bytes()
    try:
        folder = cache or Path.home() / ".cache" / "garnish"
        _make_private(folder)
        library = folder / f"{name}-{_key(source, compiler)}.so"
        if not library.exists():
            _compile(compiler, source, library)
        return ctypes.CDLL(str(library))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        raise CompileError(f"{compiler}: {error}") from error


def _make_private(folder: Path) -> None:
    """What is loaded from there runs as us, so nobody else may write there."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise CompileError(f"{folder} must belong to this user and be writable by nobody else")


def _key(source: bytes, compiler: str) -> str:
    """Differs wherever the result may: a home directory can be shared by unlike machines."""
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=COMPILE_LIMIT_S, check=True)  # noqa: S603
    processor = re.search(rb"^(flags|Features)\s*:.*$", Path("/proc/cpuinfo").read_bytes(), re.MULTILINE)
    parts = (source, version.stdout, repr(FLAGS).encode(), processor[0] if processor else b"")
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _compile(compiler: str, source: bytes, library: Path) -> None:
    """Compile beside the library and rename: a process that comes at the same time does the same, and either wins."""
    with tempfile.TemporaryDirectory(dir=library.parent) as place:
        text, code, linked = Path(place, "source.cpp"), Path(place, "code.o"), Path(place, "linked.so")
        text.write_bytes(source)
        for command in ([*FLAGS, "-c", str(text), "-o", str(code)], ["-shared", str(code), "-o", str(linked)]):
            done = subprocess.run(  # noqa: S603 - a compiler, and our own source
                [compiler, *command], capture_output=True, text=True, timeout=COMPILE_LIMIT_S
            )
            if done.returncode:
                raise CompileError(done.stderr.strip()[-500:])
        linked.replace(library)
