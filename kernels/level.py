"""Levels of this processor's instructions for matrix products, and a switch to a lower level.

The level decides the speed of bf16 products. Without AVX512 torch multiplies bf16 by a reference path, and only the
upper two levels have instructions that multiply bf16.
"""

from __future__ import annotations

import os
from pathlib import Path

SWITCH = "GARNISH_CPU_LEVEL"
"""Environment variable with the highest level that a process may use.

Unset means the highest level of the processor.
"""

LEVELS = ("avx2", "avx512", "avx512_bf16", "amx")
"""Levels in ascending order. A processor without AVX2, or of another architecture, has the level `other`."""

OTHER = "other"

_FLAGS = {
    "avx2": {"avx2", "fma", "f16c", "bmi2"},
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
    "avx512_bf16": {"avx512_bf16"},
    "amx": {"amx_bf16", "amx_tile"},
}
"""Flags that /proc/cpuinfo must list for a level, in addition to those of lower levels."""


def host_level() -> str:
    """Returns the processor's highest level, regardless of the switch."""
    try:
        return level_of(Path("/proc/cpuinfo").read_text())
    except OSError:
        return OTHER


def level_of(cpuinfo: str) -> str:
    """Returns the highest level whose flags are all listed in the text of /proc/cpuinfo."""
    lines = cpuinfo.splitlines()
    flags = next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())
    level = OTHER
    for name in LEVELS:
        if not _FLAGS[name] <= flags:
            break
        level = name
    return level


def used_level() -> str:
    """Returns this process's level.

    Raises ValueError if SWITCH names a level that is unknown or above the host's.
    """
    requested, host = os.environ.get(SWITCH, ""), host_level()
    if not requested:
        return host
    if requested not in LEVELS:
        raise ValueError(f"{SWITCH}={requested}: unknown; use one of {', '.join(LEVELS)}, or leave it unset")
    if requested not in levels_up_to(host):
        raise ValueError(f"{SWITCH}={requested}: this processor has {host} at most")
    return requested


def multiplies_bf16() -> bool:
    """Returns True if this process's level has instructions that multiply bf16. Raises ValueError as `used_level`."""
    return used_level() in ("avx512_bf16", "amx")


def levels_up_to(level: str) -> tuple[str, ...]:
    """Returns the levels from the lowest up to `level`; empty for `other`."""
    return LEVELS[: LEVELS.index(level) + 1] if level in LEVELS else ()


def compiler_flags(level: str) -> tuple[str, ...]:
    """Returns the compiler options for a level. The upper two levels add nothing that our operators use."""
    if level == host_level():
        return ("-march=native", "-mprefer-vector-width=512")
    return ("-march=x86-64-v3",) if level == "avx2" else ("-march=x86-64-v4", "-mprefer-vector-width=512")
