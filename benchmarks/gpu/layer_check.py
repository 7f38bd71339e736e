"""Operations of a GPU between a decoder layer's products, against plain torch in fp32 over drawn shapes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.gpu.check import WrongResult
from kernels.decoder import Heads, PagedCache
from kernels.gpu_ops import MIN_PIECE, LayerOperations, Rotary, Rows, decode_scratch
from kernels.gpu_reference import TorchOperations
from node_agent.runner.cuda_layers import layer_operations

TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""Largest difference over a row's largest value: fp32 does not round what lies between, as the operations do."""
BLOCK = 16
CONTEXTS = (1, BLOCK, BLOCK + 1, MIN_PIECE + 1)
"""Contexts of the first rows; others follow, of which the longest is cut into several pieces."""
MAX_CONTEXT, ROWS, MAX_CHUNK = 4 * MIN_PIECE, 7, 24
BLOCKS_OF_ROW = MAX_CONTEXT // BLOCK
SHAPES = (
    (4, 2, 16, None), (6, 6, 64, None), (8, 1, 80, None), (6, 2, 96, 150), (8, 2, 128, 40), (32, 8, 128, None),
    (8, 1, 256, None),
)  # fmt: skip
"""Heads, key and value heads, their width, attention window."""

Given = dict[str, torch.Tensor]


def check_layers(device: torch.device, seed: int, shapes: tuple[Any, ...] = SHAPES) -> Iterator[dict[str, Any]]:
    """Yields the worst error of each operation and dtype. Raises WrongResult at the first that is wrong."""
    operations, plain, rng = layer_operations(device), TorchOperations(), random.Random(seed)
    worst: dict[tuple[str, torch.dtype], float] = {}
    for heads, kv_heads, width, window in shapes:
        how = Heads(heads, kv_heads, width, width**-0.5, window)
        inputs = draw(rng, how)
        for dtype in TOLERANCE:
            of_gpu = _run(operations, inputs, how, dtype, device)
            rounded = {name: value.to(dtype).float() if value.is_floating_point() else value
                       for name, value in inputs.items()}  # fmt: skip
            expected = _run(plain, rounded, how, torch.float32, torch.device("cpu"))
            for name, results in of_gpu.items():
                error = max(map(_error, results, expected[name]))
                if not error <= TOLERANCE[dtype]:
                    raise WrongResult(f"{name} in {dtype} with {how} is {error:.2e} off")
                worst[name, dtype] = max(worst.get((name, dtype), 0.0), error)
    for (name, dtype), error in worst.items():
        yield {"operation": name, "dtype": str(dtype)[6:], "worst_error": error}


def draw(rng: random.Random, how: Heads) -> Given:
    """Rows of chosen and drawn contexts over drawn blocks, and a chunk of each row's last tokens."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    contexts = [*CONTEXTS, *(rng.randint(1, MAX_CONTEXT) for _ in range(ROWS - len(CONTEXTS) - 1)), MAX_CONTEXT]
    chunks = [rng.randint(1, min(context, MAX_CHUNK)) for context in contexts]
    blocks = ROWS * BLOCKS_OF_ROW + 1
    free, tokens = list(range(1, blocks)), sum(chunks)
    rng.shuffle(free)
    table = torch.zeros(ROWS, BLOCKS_OF_ROW, dtype=torch.int32)
    for row, context in enumerate(contexts):
        need = -(-context // BLOCK)
        table[row, :need] = torch.tensor([free.pop() for _ in range(need)])
    at = torch.tensor(
        [context - chunk + i for context, chunk in zip(contexts, chunks, strict=True) for i in range(chunk)]
    )
    owner = torch.repeat_interleave(torch.arange(ROWS), torch.tensor(chunks))
    angles = torch.outer(torch.arange(MAX_CONTEXT).float(), 10.0 ** -torch.arange(how.head_dim // 2).float())
    width, cache_shape = how.heads * how.head_dim, (BLOCK * blocks, how.kv_heads, how.head_dim)
    return {
        "x": noise(tokens, width), "weight": noise(width), "residual": noise(tokens, width),
        "gate_up": noise(tokens, 2 * width), "qkv": noise(tokens, width + 2 * how.kv_heads * how.head_dim),
        "cos": angles.cos(), "sin": angles.sin(), "keys": noise(*cache_shape), "values": noise(*cache_shape),
        "positions": at,
        "slots": table[owner, at // BLOCK].long() * BLOCK + at % BLOCK, "table": table,
        "contexts": torch.tensor(contexts, dtype=torch.int32),
        "starts": torch.tensor([0, *chunks]).cumsum(0).to(torch.int32),
    }  # fmt: skip


def _run(
    layer: LayerOperations, inputs: Given, how: Heads, dtype: torch.dtype, device: torch.device
) -> dict[str, list[torch.Tensor]]:
    """Returns the tensors that each operation writes."""

    def fresh() -> Given:
        return {
            name: value.to(device, dtype, copy=True) if value.is_floating_point() else value.to(device)
            for name, value in inputs.items()
        }

    def norm(t: Given) -> list[torch.Tensor]:
        out = torch.empty_like(t["x"])
        layer.add_rms_norm(t["x"], t["weight"], 1e-5, out=out, residual=t["residual"])
        return [out, t["residual"]]

    def rotate(t: Given) -> list[torch.Tensor]:
        rotary, cache = Rotary(t["cos"], t["sin"]), PagedCache(how, t["keys"], t["values"], BLOCK)
        layer.rotate_and_store(t["qkv"], rotary, cache, positions=t["positions"], slots=t["slots"])
        return [t["qkv"], t["keys"], t["values"]]

    def silu(t: Given) -> list[torch.Tensor]:
        out = torch.empty_like(t["x"])
        layer.silu_mul(t["gate_up"], out=out)
        return [out]

    def decode(t: Given) -> list[torch.Tensor]:
        out = torch.zeros(ROWS, t["x"].shape[1], dtype=dtype, device=device)
        scratch = decode_scratch(ROWS, how, MAX_CONTEXT, device)
        cache, rows = PagedCache(how, t["keys"], t["values"], BLOCK), Rows(t["contexts"], t["table"])
        layer.decode_attention(t["qkv"][:ROWS], cache, rows, out=out, scratch=scratch)
        return [out]

    def prefill(t: Given) -> list[torch.Tensor]:
        out, cache = torch.zeros_like(t["x"]), PagedCache(how, t["keys"], t["values"], BLOCK)
        layer.prefill_attention(t["qkv"], cache, Rows(t["contexts"], t["table"], t["starts"]), out=out)
        return [out]

    calls: dict[str, Callable[[Given], list[torch.Tensor]]] = {
        "add_rms_norm": norm, "rotate_and_store": rotate, "silu_mul": silu, "decode_attention": decode,
        "prefill_attention": prefill,
    }  # fmt: skip
    return {name: call(fresh()) for name, call in calls.items()}


def _error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative to the largest value of each row, for long contexts have small ones; NaN counts as infinite."""
    apart, largest = ((part.abs().flatten(1).amax(dim=1)) for part in (result.float().cpu() - expected, expected))
    error = float((apart / largest.clamp(min=1e-6)).max())
    return error if error == error else float("inf")
