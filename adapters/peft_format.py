"""Reading of the two untrusted files that PEFT saves: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import codecs
import math
from pathlib import Path
from typing import Any

import msgspec

from adapters import strict_json
from adapters.errors import InvalidAdapter, Problem, TooLarge
from adapters.peft_config import CONFIG_FILE, MAX_CONFIG_BYTES, WEIGHTS_FILE
from adapters.wrong_files import LFS_POINTER, PICKLE_PROBLEM, POINTER_PROBLEM

MAX_HEADER_BYTES = 16 << 20
"""Maximum size of the safetensors header in bytes. The largest real adapters have some thousands of tensors; a longer
header would be mostly metadata."""
MAX_TENSORS = 100_000
BOM_WARNING = f"{CONFIG_FILE} begins with a BOM, a byte order mark, which is ignored"

ITEM_BITS = {
    **{"BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4},
    **{"I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32},
    **{"F64": 64, "I64": 64, "U64": 64, "C64": 64},
}
"""Bits per element of every dtype that safetensors defines, so that sizes can be checked before a dtype is refused."""


class TensorRef(msgspec.Struct, frozen=True):
    """Name, dtype, shape and position of a tensor in the weights file."""

    name: str
    dtype: str
    """Name of the dtype in safetensors, such as F32, F16 or BF16."""
    shape: tuple[int, ...]
    start: int
    """Absolute offset in the file, in bytes."""
    size: int
    """Size of the tensor in bytes."""


class PeftAdapter(msgspec.Struct, frozen=True):
    """An adapter as described by its files, not yet checked against a base model."""

    config: dict[str, Any]
    tensors: dict[str, TensorRef]
    weights: Path
    warnings: tuple[str, ...] = ()
    """Peculiarities of the files that do not change what they mean."""


def read_peft(config: bytes, weights: Path, max_tensors: int = MAX_TENSORS) -> PeftAdapter:
    """Returns the parsed config and safetensors header. Reads no tensors.

    Raises InvalidAdapter when either file is malformed or there are more than `max_tensors` tensors, and TooLarge when
    the config exceeds MAX_CONFIG_BYTES.
    """
    problems: list[Problem] = []
    parsed: dict[str, Any] = {}
    tensors: dict[str, TensorRef] = {}
    try:
        parsed = read_config(config)
    except InvalidAdapter as error:
        problems += error.problems
    try:
        tensors = read_tensor_table(weights, max_tensors)
    except InvalidAdapter as error:
        problems += error.problems
    if problems:
        raise InvalidAdapter(problems)
    warnings = (BOM_WARNING,) if config.startswith(codecs.BOM_UTF8) else ()
    return PeftAdapter(config=parsed, tensors=tensors, weights=weights, warnings=warnings)


def read_config(data: bytes) -> dict[str, Any]:
    """Returns adapter_config.json as a dict. Raises InvalidAdapter when it is malformed, or TooLarge above
    MAX_CONFIG_BYTES."""
    if len(data) > MAX_CONFIG_BYTES:
        raise TooLarge(f"{CONFIG_FILE} has {len(data)} bytes; at most {MAX_CONFIG_BYTES} are read", MAX_CONFIG_BYTES)
    if data.startswith(LFS_POINTER):
        raise InvalidAdapter([Problem(CONFIG_FILE, POINTER_PROBLEM)])
    try:
        parsed = strict_json.loads(data.removeprefix(codecs.BOM_UTF8))
    except strict_json.InvalidJson as error:
        raise InvalidAdapter([Problem(CONFIG_FILE, f"not valid JSON: {error}")]) from None
    if not isinstance(parsed, dict):
        raise InvalidAdapter([Problem(CONFIG_FILE, "not a JSON object", "an object", type(parsed).__name__)])
    return parsed


def read_tensor_table(weights: Path, max_tensors: int = MAX_TENSORS) -> dict[str, TensorRef]:
    """Returns the tensors of a safetensors file by name. Raises InvalidAdapter with all problems of the table, or with
    a single one when it has more than `max_tensors` entries."""
    with weights.open("rb") as stream:
        total = stream.seek(0, 2)
        stream.seek(0)
        start = stream.read(len(LFS_POINTER))
        _refuse_other_formats(start)
        length = int.from_bytes(start[:8], "little")
        if length > MAX_HEADER_BYTES:
            raise _file_problem("its header is too long", f"at most {MAX_HEADER_BYTES} bytes", f"{length} bytes")
        if 8 + length > total:
            raise _file_problem(
                "its header does not end inside the file", f"at most {total - 8} bytes", f"{length} bytes"
            )
        stream.seek(8)
        raw = stream.read(length)
    _check_count(raw.count(b'"data_offsets"'), max_tensors)  # before the slow parsing
    try:
        table = strict_json.loads(raw)
    except strict_json.InvalidJson as error:
        raise _file_problem(f"its header is not valid JSON: {error}") from None
    if not isinstance(table, dict):
        raise _file_problem("its header is not a JSON object")
    table.pop("__metadata__", None)
    _check_count(len(table), max_tensors)
    return _check_table(table, 8 + length, total)


def read_bytes(weights: Path, ref: TensorRef) -> bytes:
    """Returns the tensor's bytes.

    The file is read, not mapped: truncating a mapped file would kill the process. Raises InvalidAdapter when the file
    has become shorter since its header was read.
    """
    with weights.open("rb") as stream:
        stream.seek(ref.start)
        data = stream.read(ref.size)
    if len(data) != ref.size:
        raise _file_problem("it became shorter while it was read")
    return data


def _refuse_other_formats(start: bytes) -> None:
    """Raises InvalidAdapter for formats that users upload by mistake, recognised by their first bytes."""
    if start.startswith(b"PK\x03\x04"):
        raise _file_problem(f"a zip archive, as torch.save writes it: {PICKLE_PROBLEM}")
    # A safetensors header of 640 + 256 n bytes starts like a pickle, but its ninth byte opens a JSON object.
    if start[:1] == b"\x80" and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05") and start[8:9] != b"{":
        raise _file_problem(PICKLE_PROBLEM)
    if start.startswith(b"GGUF"):
        raise _file_problem("a GGUF file, llama.cpp's: deploy the PEFT adapter that it was converted from")
    if start.startswith(LFS_POINTER):
        raise _file_problem(POINTER_PROBLEM)
    if len(start) < 9 or start[8:9] != b"{":
        raise _file_problem("not a safetensors file")


def _check_count(tensors: int, limit: int) -> None:
    if tensors > limit:
        raise _file_problem("its header lists too many tensors", f"at most {limit}", str(tensors))


def _check_table(table: dict[str, Any], data_start: int, total: int) -> dict[str, TensorRef]:
    problems: list[Problem] = []
    tensors: dict[str, TensorRef] = {}
    for name, entry in table.items():
        outcome = _tensor_ref(name[:300], entry, data_start, total)
        if isinstance(outcome, Problem):
            problems.append(outcome)
        else:
            tensors[name] = outcome
    if not problems:
        problems += _check_cover(tensors, data_start, total)
    if problems:
        raise InvalidAdapter(problems)
    return tensors


def _tensor_ref(name: str, entry: Any, data_start: int, total: int) -> TensorRef | Problem:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        return Problem(name, "malformed header entry", "an object with dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BITS:
        return Problem(name, "unknown dtype", "F32, F16 or BF16", str(dtype)[:40])
    if not _naturals(shape) or len(shape) > 8:
        return Problem(name, "malformed shape", "a list of at most 8 sizes", str(shape)[:80])
    if not _naturals(offsets) or len(offsets) != 2:
        return Problem(name, "malformed data_offsets", "[begin, end]", str(offsets)[:80])
    begin, end = offsets
    if not begin <= end <= total - data_start:
        return Problem(name, "its offsets lie outside the file", f"0 to {total - data_start}", f"{begin} to {end}")
    bits = math.prod(shape) * ITEM_BITS[dtype]
    if bits % 8 or bits // 8 != end - begin:
        return Problem(
            name,
            "its size does not fit its shape and dtype",
            f"{bits // 8} bytes for {dtype} {shape}",
            f"{end - begin} bytes",
        )
    return TensorRef(name=name, dtype=dtype, shape=tuple(shape), start=data_start + begin, size=end - begin)


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 48 for item in value)


def _check_cover(tensors: dict[str, TensorRef], data_start: int, total: int) -> list[Problem]:
    """Returns a problem for each overlap or gap between the tensors' data. The tensors must cover the data part
    exactly; otherwise another reader could see other values."""
    problems: list[Problem] = []
    end = data_start
    for ref in sorted(tensors.values(), key=lambda ref: (ref.start, ref.size)):
        if ref.start < end:
            problems.append(Problem(ref.name, "its bytes overlap those of another tensor"))
        elif ref.start > end:
            problems.append(Problem(ref.name, "unused bytes lie before it", f"offset {end}", f"offset {ref.start}"))
        end = max(end, ref.start + ref.size)
    if end != total and not problems:
        problems.append(Problem(WEIGHTS_FILE, "bytes follow the last tensor", f"{end} bytes", f"{total} bytes"))
    return problems


def _file_problem(problem: str, expected: str | None = None, actual: str | None = None) -> InvalidAdapter:
    return InvalidAdapter([Problem(WEIGHTS_FILE, problem, expected, actual)])
