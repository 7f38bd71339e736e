"""Which instructions this processor has for matrix products, and how a process is held to fewer of them.

A level decides how fast a bf16 product is: without AVX512 torch multiplies bf16 by a reference path, and only the
upper two levels have instructions that multiply bf16.
"""

from __future__ import annotations

import os
from pathlib import Path

SWITCH = "GARNISH_CPU_LEVEL"
"""Environment variable that names the highest level a process may use; unset: all that the processor has."""

LEVELS = ("avx2", "avx512", "avx512_bf16", "amx")
"""From the lowest. A processor below all of them, or of another kind, has the level `other`."""

OTHER = "other"

_FLAGS = {
    "avx2": {"avx2", "fma", "f16c", "bmi2"},
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
    "avx512_bf16": {"avx512_bf16"},
    "amx": {"amx_bf16", "amx_tile"},
}
"""What /proc/cpuinfo must list for a level, beside what the lower ones need."""


def host_level() -> str:
    """Returns the highest level that the processor has, whatever the switch says."""
    try:
        return level_of(Path("/proc/cpuinfo").read_text())
    except OSError:
        return OTHER


def level_of(cpuinfo: str) -> str:
    """Returns the highest level that a /proc/cpuinfo tells of."""
    lines = cpuinfo.splitlines()
    flags = next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())
    level = OTHER
    for name in LEVELS:
        if not _FLAGS[name] <= flags:
            break
        level = name
    return level


def used_level() -> str:
    """Returns the level that this process computes with. Raises ValueError for a switch that names none, or one that
    the processor lacks."""
    wanted, host = os.environ.get(SWITCH, ""), host_level()
    if not wanted:
        return host
    if wanted not in LEVELS:
        raise ValueError(f"{SWITCH}={wanted}: unknown; use one of {', '.join(LEVELS)}, or leave it unset")
    if wanted not in levels_up_to(host):
        raise ValueError(f"{SWITCH}={wanted}: this processor has {host} at most")
    return wanted


def multiplies_bf16() -> bool:
    """Returns whether the level that this process computes with has instructions that multiply bf16. Raises ValueError
    as `used_level`."""
    return used_level() in ("avx512_bf16", "amx")


def levels_up_to(level: str) -> tuple[str, ...]:
    """Returns all levels from the lowest to this one; none for `other`."""
    return LEVELS[: LEVELS.index(level) + 1] if level in LEVELS else ()


def compiler_flags(level: str) -> tuple[str, ...]:
    """Returns the compiler's options for a level. The upper two add nothing that our operators use."""
    if level == host_level():
        return ("-march=native", "-mprefer-vector-width=512")
    return ("-march=x86-64-v3",) if level == "avx2" else ("-march=x86-64-v4", "-mprefer-vector-width=512")
