"""Values of tensors in a weights file, in the dtypes in which they are served."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from adapters.errors import Problem
from adapters.peft_config import WEIGHTS_FILE
from adapters.peft_format import TensorRef, read_bytes

SERVED_DTYPES = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F64": "float32",
    "F8_E4M3": "bfloat16",
    "F8_E5M2": "bfloat16",
}
"""Dtypes in which tensors are served, by their names in safetensors. float32 has float64's values rounded once, and
bfloat16 has those of float8 exactly."""
ITEMS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "F64": "<f8", "F8_E4M3": "u1", "F8_E5M2": "u1"}
FLOAT8 = {"F8_E4M3": (3, 7), "F8_E5M2": (2, 15)}
"""Bits of the mantissa, and bias of the exponent."""


def read_tensor(weights: Path, ref: TensorRef) -> npt.NDArray[Any]:
    """Returns the tensor's elements in their served dtype as a flat array: float32, float16, or uint16 with the raw
    bits of bfloat16.

    Raises InvalidAdapter when the file has become shorter since its header was read.
    """
    values = np.frombuffer(read_bytes(weights, ref), dtype=ITEMS[ref.dtype])
    if ref.dtype in FLOAT8:
        bits: npt.NDArray[Any] = float8_table(ref.dtype)[values]
        return bits
    if ref.dtype == "F64":
        with np.errstate(over="ignore"):  # found as an infinite value
            return values.astype("<f4")
    return values


def as_float32(values: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.float32]:
    """Returns the values of `read_tensor` as float32, which has all of them exactly. `dtype`: the served one."""
    return (values.astype("<u4") << 16).view("<f4") if dtype == "bfloat16" else values.astype("<f4")


@cache
def float8_table(dtype: str) -> npt.NDArray[np.uint16]:
    """Returns the raw bits of bfloat16 for each of the 256 values of a float8 dtype."""
    mantissa_bits, bias = FLOAT8[dtype]
    codes = np.arange(128)
    exponent, mantissa = codes >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    fraction = mantissa / (1 << mantissa_bits)
    positive = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))
    if dtype == "F8_E4M3":
        positive[127] = np.nan
    else:
        positive[exponent == 31] = np.nan
        positive[(exponent == 31) & (mantissa == 0)] = np.inf
    values = np.concatenate((positive, -positive)).astype("<f4")
    return (values.view("<u4") >> 16).astype("<u2")


def is_finite(weights: Path, ref: TensorRef) -> bool:
    """Returns whether all of the tensor's values are finite in their served dtype."""
    values = read_tensor(weights, ref)
    if SERVED_DTYPES[ref.dtype] == "bfloat16":
        return not bool(np.any((values & 0x7F80) == 0x7F80))  # all exponent bits set
    return bool(np.isfinite(values).all())


def dtype_problem(refs: Sequence[TensorRef]) -> Problem:
    """Returns one problem for all tensors of dtypes that are not served."""
    dtypes = ", ".join(sorted({ref.dtype for ref in refs}))
    number = f"{len(refs)} tensors have" if len(refs) > 1 else "one tensor has"
    reason = f"{number} a dtype that is not served, such as {refs[0].name[:300]}"
    return Problem(WEIGHTS_FILE, reason, ", ".join(SERVED_DTYPES), dtypes)


def dtype_warnings(refs: Iterable[TensorRef]) -> list[str]:
    """Returns a warning if tensors are converted."""
    dtypes = {ref.dtype for ref in refs}
    warnings = []
    if "F64" in dtypes:
        warnings.append("its tensors of float64 are served as float32, rounded once")
    if dtypes & FLOAT8.keys():
        warnings.append("its tensors of float8 are served as bfloat16, which has the same values")
    return warnings
