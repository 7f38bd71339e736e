"""Compiles the CPU operators and caches the library per user.

The cache key consists of the sources, the compiler with its flags, the processor and the level of its instructions
(`kernels.level`). The sources are plain C++ behind a C interface, without headers of Python or torch; compiling takes
three seconds. OpenMP stays unresolved at link time. Its functions then come from the OpenMP that torch has loaded, so
both share one thread pool.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import TypeVar

import torch  # noqa: F401 - loads the OpenMP whose functions the library lacks

from kernels.level import compiler_flags, used_level

SOURCES = ("grouped_lora.cpp", "decoder.cpp", "product.cpp", "handoff.cpp")
HEADERS = ("vectors.h", "dots.h")
COMPILERS = ("g++", "clang++")
# avoid-fma-max-bits=0: otherwise g++ uses FMA in only some chains of sums, depending on their length and the processor.
# A token's bits would then depend on the number of tokens in the batch.
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "--param=avoid-fma-max-bits=0", "-fPIC", "-fopenmp")
COMPILE_LIMIT_S = 120

Made = TypeVar("Made")


class CompileError(RuntimeError):
    """The operators can't be compiled or loaded on this host; the message has the reason.

    The torch path computes the same results.
    """


def unless_uncompiled(make: Callable[[], Made], log: logging.Logger, warning: str) -> Made | None:
    """Calls `make`, which loads compiled operators, and returns its result.

    On a CompileError it logs `warning` with the reason and returns None.
    """
    try:
        return make()
    except CompileError as error:
        log.warning(warning, extra={"reason": str(error)})
        return None


def load_library(cache: Path | None = None) -> ctypes.CDLL:
    """Loads the compiled operators from the folder `cache`; compiles them first if they are missing.

    `cache` None means ~/.cache/garnish. Raises CompileError. Raises ValueError if GARNISH_CPU_LEVEL names a level that
    can't be used.
    """
    flags = (*FLAGS, *compiler_flags(used_level()))
    compiler = next((path for command in COMPILERS if (path := shutil.which(command))), None)
    if compiler is None:
        raise CompileError(f"no C++ compiler ({', '.join(COMPILERS)}) is installed")
    texts = {name: (files(__package__) / name).read_bytes() for name in (*SOURCES, *HEADERS)}
    try:
        folder = cache or cache_folder()
        _make_private(folder)
        library = folder / f"operators-{_key(texts, compiler, flags)}.so"
        if not library.exists():
            _compile(compiler, flags, texts, library)
        return ctypes.CDLL(str(library))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        raise CompileError(f"{compiler}: {error}") from error


def cache_folder() -> Path:
    """Returns the folder with this user's compiled operators and the measurements of this host.

    Raises RuntimeError for a user without a home directory.
    """
    return Path.home() / ".cache" / "garnish"


def processor_key() -> str:
    """Returns the processor's feature flags and level, as a key for compiled code and measurements.

    A key is needed since hosts with different processors can share a home directory.
    """
    features = re.search(r"^(flags|Features)\s*:.*$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return f"{features[0] if features else ''} {used_level()}"


def _make_private(folder: Path) -> None:
    """Creates the folder if it is missing.

    Raises CompileError unless only this user can write to the folder, since code in it runs as this user.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise CompileError(f"{folder} must belong to this user and be writable by nobody else")


def _key(texts: dict[str, bytes], compiler: str, flags: tuple[str, ...]) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=COMPILE_LIMIT_S, check=True)  # noqa: S603
    parts = (*texts.values(), version.stdout, repr(flags).encode(), processor_key().encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _compile(compiler: str, flags: tuple[str, ...], texts: dict[str, bytes], library: Path) -> None:
    """Compiles in a temporary folder and renames the result to `library`.

    If several processes compile at the same time, the last rename wins; all results are equal.
    """
    with tempfile.TemporaryDirectory(dir=library.parent) as name:
        place = Path(name)
        for text, content in texts.items():
            (place / text).write_bytes(content)
        objects = [str(place / source) + ".o" for source in SOURCES]
        for source, code in zip(SOURCES, objects, strict=True):
            _call([compiler, *flags, "-c", str(place / source), "-o", code])
        linked = place / "linked.so"
        _call([compiler, "-shared", *objects, "-o", str(linked)])
        linked.replace(library)


def _call(command: list[str]) -> None:
    done = subprocess.run(  # noqa: S603 - a compiler, and our own sources
        command, capture_output=True, text=True, timeout=COMPILE_LIMIT_S
    )
    if done.returncode:
        raise CompileError(done.stderr.strip()[-500:])
