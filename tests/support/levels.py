"""Processes that are held to a level of CPU instructions."""

from __future__ import annotations

from kernels.level import SWITCH

ONEDNN = {"avx2": "AVX2", "avx512": "AVX512_CORE", "avx512_bf16": "AVX512_CORE_BF16", "amx": "AVX512_CORE_AMX"}


def level_environment(level: str) -> dict[str, str]:
    """Returns the environment variables that hold a new process to a level: our operators, torch, oneDNN and MKL."""
    variables = {SWITCH: level, "ONEDNN_MAX_CPU_ISA": ONEDNN[level]}
    if level == "avx2":
        variables |= {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
    return variables
