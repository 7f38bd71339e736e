"""A ModelRunner without a model, and its reference: each next token follows from a hash of all that precedes it.

A token's hash is made of the hash before it, the token's id, and a sum of what the pass's LoRA code adds for it in all
layers. It is kept in the token's slot of the KV cache, where the next token's pass looks it up by the block table. So a
wrong block, a lost token, another adapter's weights or a layer that was never added change every later token.

Inputs and adapters have whole numbers, small enough that fp32 adds them without rounding in any order: CPU workers, the
device's operator and the reference find the same sums. The reference reads the adapter's PEFT files with numpy alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from adapters.base_model import PROJECTIONS, BaseModel, load_base_model
from cluster.text import end_token_ids
from node_agent.device_event import ENDED, Event
from node_agent.runner.sampler import step_output
from node_agent.types import GROUPS, PassLora, RunnerSettings, StepBatch, StepOutput

SHAPE: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_hidden_layers": 5, "vocab_size": 512, "max_position_embeddings": 512,
    "eos_token_id": 2,
}  # fmt: skip
ADAPTER_TARGETS = tuple(f"{name}_proj" for name in PROJECTIONS)
SCORES = 8.0
"""Range of the scores of tokens, from 0."""


def write_base(directory: Path) -> Path:
    """Writes a base model of SHAPE whose weights are one number, for nobody computes with them."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(SHAPE))
    save_file({"none": np.zeros(1, np.float32)}, directory / "model.safetensors")
    return directory


def write_adapter(
    base: BaseModel, directory: Path, seed: int, rank: int = 4, targets: Sequence[str] = ADAPTER_TARGETS
) -> Path:
    """Writes a PEFT adapter of rank `rank`, with whole numbers from -2 to 2 and a scale of 1 or 2."""
    rng, alpha = np.random.default_rng(seed), rank * (1 + seed % 2)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": [*targets],
    }
    tensors = {}
    for layer in range(base.num_layers):
        for module, (d_in, d_out) in zip(base.family.projections, base.widths, strict=True):
            if module.rpartition(".")[2] in targets:
                path = f"base_model.model.model.layers.{layer}.{module}"
                tensors[f"{path}.lora_A.weight"] = rng.integers(-2, 3, (rank, d_in)).astype(np.float32)
                tensors[f"{path}.lora_B.weight"] = rng.integers(-2, 3, (d_out, rank)).astype(np.float32)
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    return directory


def open_runner(settings: RunnerSettings) -> HashRunner:
    """An OpenRunner."""
    return HashRunner(settings)


class HashRunner:
    """A ModelRunner of a base model that has a config.json and no weights."""

    name = "hash"
    products = None
    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(self, settings: RunnerSettings) -> None:
        self.base = load_base_model(settings.model_dir)
        self.eos_ids = end_token_ids(settings.model_dir)
        self.num_layers, self.block_tokens = self.base.num_layers, settings.block_tokens
        self.num_blocks = settings.num_blocks(self.dtype)
        self.hashes = np.zeros(self.num_blocks * self.block_tokens, np.uint64)
        """The KV cache: the hash of each token, by slot."""
        self.on_layer: Callable[[StepBatch, int], None] = lambda batch, layer: None
        """Called before each layer of a pass: for tests that hold one up."""

    def start(self, batch: StepBatch, lora: PassLora | None) -> HashPass:
        return HashPass(self, batch, lora)


class HashPass:
    stretch = 1

    def __init__(self, runner: HashRunner, batch: StepBatch, lora: PassLora | None) -> None:
        self.runner, self.batch, self.lora, self.layer = runner, batch, lora, 0
        self.added = np.zeros(batch.n_tokens, np.int64)
        self.hashes = np.zeros(batch.n_tokens, np.uint64)

    def advance(self, to_layer: int) -> None:
        for layer in range(self.layer, to_layer):
            self.runner.on_layer(self.batch, layer)
            if self.lora is not None:
                self.added += self._added(self.lora, layer)
        self.layer = max(self.layer, to_layer)

    def _added(self, lora: PassLora, layer: int) -> np.ndarray:
        """Returns i64[T]: the weighted sums of what the LoRA code adds in one layer."""
        total = np.zeros(self.batch.n_tokens, np.int64)
        token_ids = self.batch.token_ids[: self.batch.n_tokens].numpy()
        for group, members in GROUPS.items():
            widths = [self.runner.base.widths[p] for p in members]
            x = torch.from_numpy(inputs(token_ids, widths[0][0]))
            if lora.begin(layer, group, x):
                ys = [torch.zeros(len(token_ids), d_out) for _, d_out in widths]
                lora.finish(layer, group, ys)
                for p, y in zip(members, ys, strict=True):
                    total += weighted(y.numpy(), layer, p)
        return total

    def finish(self) -> StepOutput:
        assert self.layer == self.runner.num_layers
        batch, slots, at = self.batch, self.batch.slot_mapping.numpy(), 0
        tokens = batch.token_ids.numpy()
        for row, (length, context) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
            value = self._hash_before(row, context - length)
            for i in range(at, at + length):
                value = following(value, int(tokens[i]), int(self.added[i]))
                self.hashes[i] = self.runner.hashes[slots[i]] = value
            at += length
        return step_output(self._logits, batch)

    def _hash_before(self, row: int, position: int) -> int:
        """Returns the hash that the KV cache has of the token before `position`."""
        if not position:
            return 0
        size = self.runner.block_tokens
        block = int(self.batch.block_table[row, (position - 1) // size])
        return int(self.runner.hashes[block * size + (position - 1) % size])

    def _logits(self, rows: torch.Tensor) -> torch.Tensor:
        vocabulary, eos = self.runner.base.vocab_size, self.runner.eos_ids
        found = [scores(int(self.hashes[row]), vocabulary, eos) for row in rows.tolist()]
        return torch.from_numpy(np.stack(found)) if found else torch.empty(0, vocabulary)

    def abort(self) -> Event:
        return ENDED


def inputs(token_ids: np.ndarray, width: int) -> np.ndarray:
    """Returns f32[T, width] of -1, 0 and 1: what every layer gets of these tokens."""
    return ((token_ids[:, None] * 7 + np.arange(width) * (1 + token_ids[:, None] % 5)) % 3 - 1).astype(np.float32)


def weighted(y: np.ndarray, layer: int, projection: int) -> np.ndarray:
    """Returns i64[T]: sums of y [T, d_out], in which each column, layer and projection counts differently."""
    columns = 1 + np.arange(y.shape[1], dtype=np.int64) % 11
    sums: np.ndarray = y.astype(np.int64) @ columns * (1 + 13 * layer + 5 * projection)
    return sums


def following(before: int, token: int, added: int) -> int:
    """Returns the 63-bit hash of a token."""
    text = f"{before} {token} {added}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1


def scores(value: int, vocabulary: int, eos_ids: frozenset[int]) -> np.ndarray:
    """Returns f32[V]: the scores of the tokens behind one with this hash. Those of end tokens are the lowest."""
    found = np.random.default_rng(value).permutation(vocabulary).astype(np.float32) * (SCORES / vocabulary)
    found[[*eos_ids]] = -1.0
    return found


class HashReference:
    """What a HashRunner must answer, computed from the PEFT files without any code of the product."""

    def __init__(self, base: BaseModel, eos_ids: frozenset[int]) -> None:
        self.base, self.eos_ids = base, eos_ids
        self._adapters: dict[Path, dict[tuple[int, int], np.ndarray]] = {}

    def greedy(self, adapter: Path | None, prompt: list[int], count: int) -> list[int]:
        """Returns the `count` tokens that follow the prompt."""
        value, written = 0, list[int]()
        for token in prompt:
            value = self._next(value, token, adapter)
        for _ in range(count):
            written.append(int(scores(value, self.base.vocab_size, self.eos_ids).argmax()))
            value = self._next(value, written[-1], adapter)
        return written

    def _next(self, value: int, token: int, adapter: Path | None) -> int:
        added = 0
        for (layer, projection), delta in (self._deltas(adapter) if adapter else {}).items():
            x = inputs(np.array([token]), delta.shape[1])
            added += int(weighted(x @ delta.T, layer, projection)[0])
        return following(value, token, added)

    def _deltas(self, adapter: Path) -> dict[tuple[int, int], np.ndarray]:
        """Returns scale * B A, [d_out, d_in], by (layer, projection)."""
        if adapter not in self._adapters:
            config = json.loads((adapter / "adapter_config.json").read_bytes())
            tensors, found = load_file(adapter / "adapter_model.safetensors"), {}
            for name, a in tensors.items():
                if ".lora_A." in name:
                    layer = int(name.partition(".layers.")[2].partition(".")[0])
                    projection = name.split(".")[-3].removesuffix("_proj")
                    b = tensors[name.replace(".lora_A.", ".lora_B.")]
                    found[layer, PROJECTIONS.index(projection)] = config["lora_alpha"] / config["r"] * (b @ a)
            self._adapters[adapter] = found
        return self._adapters[adapter]
