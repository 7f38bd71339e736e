"""Changes of an adapter's PEFT folder so that vLLM loads each form that a deploy accepts.

vLLM reads fewer forms than a deploy accepts: `r`, `lora_alpha` and `target_modules` must be there, `r` and each rank of
`rank_pattern` count as the adapter's rank even if no module has it, ranks and alphas must be numbers, and tensors must
not carry an adapter's name or a wrapper's part.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from adapters.peft_config import CONFIG_FILE, WEIGHTS_FILE, with_numbers
from adapters.tensor_names import plain_name
from adapters.wrapped_names import find_wrapper

DEFAULTS = {"r": 8, "lora_alpha": 8, "target_modules": None}
"""PEFT's defaults of the fields that vLLM requires."""
METADATA = "__metadata__"
"""Entry of the header that is no tensor."""
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 16 << 20


def make_loadable(folder: Path, ranks: Collection[int], modules: Collection[str]) -> None:
    """Changes the two files of a checked adapter where vLLM needs it. `ranks`: those of the adapter's modules.
    `modules`: names of the base's modules.

    Files that can't be read are left as they are: vLLM says why it does not load them. Raises OSError.
    """
    _complete_config(folder / CONFIG_FILE, ranks)
    _make_names_plain(folder / WEIGHTS_FILE, modules)


def _complete_config(file: Path, ranks: Collection[int]) -> None:
    data = file.read_bytes()
    fields = _object(data)
    if fields is None or not ranks:
        return
    changed = with_numbers(DEFAULTS | fields)
    patterns = changed.get("rank_pattern")
    if changed["r"] not in ranks:  # each module's rank comes from a pattern
        changed["r"] = max(ranks)
    if isinstance(patterns, dict):
        changed["rank_pattern"] = {key: rank for key, rank in patterns.items() if rank in ranks}
    if changed != fields or data.startswith(codecs.BOM_UTF8):
        file.write_text(json.dumps(changed))


def _make_names_plain(file: Path, modules: Collection[str]) -> None:
    """Removes an adapter's name and a wrapper's part from the names of all tensors, in place: the header keeps its
    length."""
    with file.open("r+b") as weights:
        length = int.from_bytes(weights.read(LENGTH_BYTES), "little")
        tensors = _object(weights.read(length)) if length <= MAX_HEADER_BYTES else None
        if tensors is None:
            return
        wrapped = find_wrapper((name for name in tensors if name != METADATA), modules)
        plain = {} if wrapped is None else wrapped[1]
        renamed = {plain_name(plain.get(name, name)): tensor for name, tensor in tensors.items()}
        text = json.dumps(renamed, separators=(",", ":"), ensure_ascii=False).encode()
        if renamed.keys() != tensors.keys() and len(text) <= length:
            weights.seek(LENGTH_BYTES)
            weights.write(text.ljust(length))


def _object(data: bytes) -> dict[str, Any] | None:
    """Returns the JSON object; None if the data is none."""
    try:
        value = json.loads(data)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
