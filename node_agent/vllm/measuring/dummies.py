"""PEFT folders of dummy adapters, one for each rank. They adapt the attention's inputs, as the papers' adapters do."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

from adapters.base_model import BaseModel
from adapters.modules import Module
from node_agent.vllm.folder import CONFIG, WEIGHTS

TARGETS = ("q", "k", "v", "qkv")
"""Short names of the modules that dummies adapt. Where a base model has none of them, all its modules are adapted."""
FORMATS = {"float32": ("F32", b"\x00\x00\x00\x3a"), "float16": ("F16", b"\x00\x10"), "bfloat16": ("BF16", b"\x00\x3a")}
"""Name of each data type in safetensors files, and the bytes of a small number."""
PIECE_BYTES = 1 << 20


class DummyFolders:
    """Folders of dummy adapters, made when they are first asked for."""

    def __init__(self, root: Path, base: BaseModel, dtype: str) -> None:
        """`root`: existing folder in which they are made. `dtype`: data type of adapters on the device, so that a file
        has as many bytes as the adapter there."""
        self._root, self._dtype = root, dtype
        adaptable = base.modules.adaptable.values()
        self.modules = [module for module in adaptable if module.target in TARGETS] or list(adaptable)

    def folder(self, rank: int) -> Path:
        """Returns the folder of a rank. Raises OSError if there is too little room."""
        folder = self._root / f"dummy-{rank}"
        if not folder.exists():
            folder.mkdir(mode=0o700)
            try:
                self._write(folder, rank)
            except OSError:
                shutil.rmtree(folder, ignore_errors=True)
                raise
        return folder

    def size(self, rank: int) -> int:
        """Returns the bytes of an adapter's weights."""
        itemsize = len(FORMATS[self._dtype][1])
        return sum(sum(module.widths) for module in self.modules) * rank * itemsize

    def remove(self) -> None:
        for folder in self._root.glob("dummy-*"):
            shutil.rmtree(folder, ignore_errors=True)

    def _write(self, folder: Path, rank: int) -> None:
        config = {
            "peft_type": "LORA",
            "r": rank,
            "lora_alpha": rank,
            "target_modules": sorted({module.name.rpartition(".")[2] for module in self.modules}),
            "bias": "none",
            "use_rslora": False,
            "use_dora": False,
            "task_type": "CAUSAL_LM",
        }
        (folder / CONFIG).write_text(json.dumps(config))
        header = self._header(rank)
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (folder / WEIGHTS).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            remaining, piece = self.size(rank), _piece(FORMATS[self._dtype][1])
            while remaining:
                remaining -= file.write(piece[:remaining])

    def _header(self, rank: int) -> dict[str, dict[str, object]]:
        """Returns the header of the safetensors file: each matrix with its place."""
        header: dict[str, dict[str, object]] = {}
        name, number = FORMATS[self._dtype]
        end = 0
        for module in self.modules:
            for matrix, shape in _matrices(module, rank):
                begin, end = end, end + shape[0] * shape[1] * len(number)
                key = f"base_model.model.{module.name}.{matrix}.weight"
                header[key] = {"dtype": name, "shape": list(shape), "data_offsets": [begin, end]}
        return header


def _matrices(module: Module, rank: int) -> list[tuple[str, tuple[int, int]]]:
    d_in, d_out = module.widths
    return [("lora_A", (rank, d_in)), ("lora_B", (d_out, rank))]


def _piece(number: bytes) -> bytes:
    """Returns PIECE_BYTES bytes of small numbers with drawn signs."""
    negative = number[:-1] + bytes([number[-1] | 0x80])
    draw = random.Random(0)
    numbers = b"".join(draw.choice((number, negative)) for _ in range(1024))
    return numbers * (PIECE_BYTES // len(numbers))
