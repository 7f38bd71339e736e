"""Changes of an adapter's PEFT folder so that vLLM loads each form that a deploy accepts.

vLLM reads fewer forms than PEFT: `r`, `lora_alpha` and `target_modules` must be there, `r` and each rank of
`rank_pattern` count as the adapter's rank even if no module has it, and tensors must not carry an adapter's name.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from adapters.peft_config import CONFIG_FILE, WEIGHTS_FILE
from adapters.tensor_names import plain_name

DEFAULTS = {"r": 8, "lora_alpha": 8, "target_modules": None}
"""PEFT's defaults of the fields that vLLM requires."""
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 16 << 20


def make_loadable(folder: Path, ranks: Collection[int]) -> None:
    """Changes the two files of a checked adapter where vLLM needs it. `ranks`: those of the adapter's modules.

    Files that can't be read are left as they are: vLLM says why it does not load them. Raises OSError.
    """
    _complete_config(folder / CONFIG_FILE, ranks)
    _remove_adapter_names(folder / WEIGHTS_FILE)


def _complete_config(file: Path, ranks: Collection[int]) -> None:
    fields = _object(file.read_bytes())
    if fields is None or not ranks:
        return
    changed = DEFAULTS | fields
    patterns = changed.get("rank_pattern")
    if changed["r"] not in ranks:  # each module's rank comes from a pattern
        changed["r"] = max(ranks)
    if isinstance(patterns, dict):
        changed["rank_pattern"] = {key: rank for key, rank in patterns.items() if rank in ranks}
    if changed != fields:
        file.write_text(json.dumps(changed))


def _remove_adapter_names(file: Path) -> None:
    """Removes an adapter's name from the names of all tensors, in place: the header keeps its length."""
    with file.open("r+b") as weights:
        length = int.from_bytes(weights.read(LENGTH_BYTES), "little")
        tensors = _object(weights.read(length)) if length <= MAX_HEADER_BYTES else None
        if tensors is None:
            return
        renamed = {plain_name(name): tensor for name, tensor in tensors.items()}
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
