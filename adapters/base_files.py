"""Files of a base model directory: which ones hold the weights, whether they are whole, and their fingerprint."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

from adapters.wrong_files import LFS_POINTER, POINTER_PROBLEM

LENGTH_BYTES = 8
"""Bytes at the beginning of a safetensors file that say how long its header is."""
MAX_HEADER_BYTES = 100 << 20
OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx")
INDEX = "model.safetensors.index.json"


class UnsupportedBase(ValueError):
    """The directory does not contain a base model that Garnish can serve."""


def fingerprint(directory: Path) -> str:
    """Returns the SHA-256 (hex) over config.json and all weight files. It is cached in `.garnish-fingerprint.json` in
    the directory. Raises UnsupportedBase if weight files are missing or not whole."""
    files = sorted([directory / "config.json", *weight_files(directory)])
    stamp = [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files]
    memo = directory / ".garnish-fingerprint.json"
    try:
        cached = json.loads(memo.read_bytes())
        if cached["stamp"] == stamp:
            return str(cached["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # no cached fingerprint, or a damaged one: hash again
    sha256 = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            sha256.update(f"{file.name}\0".encode() + hashlib.file_digest(stream, "sha256").digest())
    value = sha256.hexdigest()
    with contextlib.suppress(OSError):  # in a read-only directory each start hashes again
        memo.write_text(json.dumps({"stamp": stamp, "fingerprint": value}))
    return value


def weight_files(directory: Path) -> list[Path]:
    """Returns the weight files. Raises UnsupportedBase if some are missing, or if one is not whole."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        other_files = sorted(file.name for pattern in OTHER_FORMATS for file in directory.glob(pattern))
        has = f"its weights are in {other_files[0]}" if other_files else "it has no weight files"
        raise UnsupportedBase(
            f"{directory}: {has}, and *.safetensors files are read; fetch the model again with them, or write them "
            "with transformers (save_pretrained)"
        )
    listed = _listed(directory / INDEX)
    missing = sorted(listed - {file.name for file in files})
    if missing:
        raise UnsupportedBase(
            f"{directory}: {missing[0]} is missing ({len(missing)} of the {len(listed)} weight files that {INDEX} "
            "lists are); fetch the model again"
        )
    for file in files:
        problem = pointer_problem(file) or _safetensors_problem(file)
        if problem:
            raise UnsupportedBase(f"{file}: {problem}")
    return files


def pointer_problem(file: Path) -> str:
    """Returns the problem of a file that Git LFS has not fetched; empty for any other file."""
    with file.open("rb") as stream:
        is_pointer = stream.read(len(LFS_POINTER)) == LFS_POINTER
    return POINTER_PROBLEM if is_pointer else ""


def _listed(index: Path) -> set[str]:
    """Returns the names of the weight files in the index; empty without one."""
    try:
        weight_map: dict[str, Any] = json.loads(index.read_bytes())["weight_map"]
        return {str(name) for name in weight_map.values()}
    except FileNotFoundError:
        return set()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnsupportedBase(f"{index}: {pointer_problem(index) or f'it is not readable ({error})'}") from None


def _safetensors_problem(file: Path) -> str:
    """Returns why the file is no whole safetensors file; empty if it is one."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
        if not 0 < length <= min(MAX_HEADER_BYTES, max(size - LENGTH_BYTES, 0)):
            return f"it has {size} bytes, and is no whole safetensors file; fetch it again"
        header = stream.read(length)
    try:
        tensors = json.loads(header)
        ends = [entry["data_offsets"][1] for name, entry in tensors.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError, LookupError):
        return "its header is not readable; fetch it again"
    needed = LENGTH_BYTES + length + max(ends, default=0)
    return "" if size >= needed else f"it has {size} of {needed} bytes; fetch it again"
