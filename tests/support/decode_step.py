"""A decode step of a 7B model on a GPU, counted without one: its launches, and the bytes that they read and write.

Each operation of a layer runs through its own launcher on tensors without memory; what would be launched is recorded.
The layers of `node.runner: cuda` run in the same way, and must launch as much. Bytes are those of the tensors that an
operation reads and writes, each once; contexts and adapters are read whole. In a process whose Triton does not
interpret.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig

from kernels.decode import mbgmv
from kernels.decoder import Heads, PagedCache
from kernels.gpu_ops import Rotary, Rows, decode_scratch
from kernels.gpu_triton import TritonOperations
from node_agent.runner.cuda_layers import AttentionInputs, Decoder
from node_agent.runner.transformers_runner import ATTENTION, TransformersRunner, register_attention
from tests.support.kernel_cases import draw_case
from tests.support.kernel_recorder import recorded

ITEM = 2
"""Bytes of a weight, an activation and a cache element: bf16."""
BLOCK_TOKENS = 16
CAPABILITY = 90
"""Of the kernels that are recorded; the count does not depend on it."""
CONTEXT = 1024
RANK = 64
PRODUCTS = ("linear", "mm", "addmm")
NO_LAUNCH = ("empty", "empty_like", "new_empty", "t", "transpose", "slice", "view", "as_strided")
Part = tuple[str, Callable[[], object], int]
"""(operation, call, bytes)"""


@dataclass(frozen=True)
class Shape:
    name: str
    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    @property
    def qkv(self) -> tuple[int, int, int]:
        kv = self.kv_heads * self.head_dim
        return self.heads * self.head_dim, kv, kv

    def groups(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """(d_in, widths of its projections) by projection group."""
        return {
            "qkv": (self.width, self.qkv),
            "o": (self.qkv[0], (self.width,)),
            "gate_up": (self.width, (self.inner, self.inner)),
            "down": (self.inner, (self.width,)),
        }


SHAPES = (
    Shape("Llama 2 7B", 32, 4096, 11008, 32, 32, 128, 32000),
    Shape("Llama 3.1 8B", 32, 4096, 14336, 32, 8, 128, 128256),
)
ADAPTED: dict[str, tuple[str, ...]] = {"none": (), "q,k,v": ("qkv",), "all seven": ("qkv", "o", "gate_up", "down")}


class ProductCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the products that torch launches. Raises RuntimeError for what would be a launch besides."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name in PRODUCTS:
            self.count += 1
        elif name not in NO_LAUNCH:
            raise RuntimeError(f"aten.{name} in a decode step: a launch that is not counted")
        return function(*args, **(kwargs or {}))


def layer_parts(shape: Shape, rows: int) -> Iterator[Part]:
    """The base's operations of one layer, in order."""
    yield norm_part(shape, rows)
    yield product_part("q,k,v", rows, shape.width, sum(shape.qkv))
    yield from attention_parts(shape, rows)
    yield product_part("o", rows, shape.qkv[0], shape.width)
    yield norm_part(shape, rows)
    yield product_part("gate,up", rows, shape.width, 2 * shape.inner)
    gate_up, gated = without_memory(rows, 2 * shape.inner), without_memory(rows, shape.inner)
    yield "silu_mul", lambda: TritonOperations().silu_mul(gate_up, out=gated), size(gate_up, gated)
    yield product_part("down", rows, shape.inner, shape.width)


def norm_part(shape: Shape, rows: int) -> Part:
    x, residual, weight = (without_memory(*at, shape.width) for at in ((rows,), (rows,), ()))
    return (
        "add_rms_norm",
        lambda: TritonOperations().add_rms_norm(x, weight, 1e-5, out=x, residual=residual),
        4 * size(x) + size(weight),
    )


def product_part(name: str, rows: int, d_in: int, d_out: int) -> Part:
    x, weight = without_memory(rows, d_in), without_memory(d_out, d_in)
    return f"product {name}", lambda: torch.mm(x, weight.t()), size(x, weight) + rows * d_out * ITEM


def attention_parts(shape: Shape, rows: int) -> Iterator[Part]:
    """Rotary embedding, cache writes and attention of rows with CONTEXT tokens each."""
    operations, dim = TritonOperations(), shape.head_dim
    heads = Heads(shape.heads, shape.kv_heads, dim, dim**-0.5)
    keys, values = (without_memory(rows * CONTEXT, shape.kv_heads, dim) for _ in range(2))
    cache, qkv = PagedCache(heads, keys, values, BLOCK_TOKENS), without_memory(rows, sum(shape.qkv))
    rotary = Rotary(without_memory(CONTEXT, dim // 2), without_memory(CONTEXT, dim // 2))
    at = without_memory(rows, dtype=torch.int64)
    table = without_memory(rows, CONTEXT // BLOCK_TOKENS, dtype=torch.int32)
    sequences = Rows(without_memory(rows, dtype=torch.int32), table)
    out, scratch = without_memory(rows, shape.qkv[0]), decode_scratch(rows, heads, CONTEXT, qkv.device)
    yield (
        "rotate_and_store",
        lambda: operations.rotate_and_store(qkv, rotary, cache, positions=at, slots=at),
        2 * size(qkv),
    )
    yield (
        "decode_attention",
        lambda: operations.decode_attention(qkv, cache, sequences, out=out, scratch=scratch),
        size(keys, values, table) + 2 * size(out) + (2 * size(scratch) if scratch.shape[0] > 1 else 0),
    )


def adapter_parts(shape: Shape, rows: int, groups: tuple[str, ...]) -> Iterator[Part]:
    """An adapter of rank RANK for each row, on some projection groups."""
    for group in groups:
        d_in, widths = shape.groups()[group]
        small = draw_case([1], [(0, 1)], d_in, widths, torch.bfloat16)
        weights = rows * RANK * (len(widths) * d_in + sum(widths)) * ITEM
        activations = rows * (d_in + 2 * sum(widths)) * ITEM + 2 * 4 * rows * len(widths) * RANK
        yield (
            f"mbgmv {group}",
            partial(mbgmv, small.call(small.ys, max_rank=1)),
            weights + activations,
        )


def without_memory(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")


def size(*tensors: torch.Tensor) -> int:
    """Bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def count(part: Part) -> dict[str, Any]:
    """Launches and bytes of one operation."""
    operation, call, moved = part
    with recorded(CAPABILITY) as launches, ProductCount() as products:
        call()
    return {"operation": operation, "launches": len(launches) + products.count, "bytes": moved}


def runner_launches(shape: Shape, rows: int) -> int:
    """Launches of a layer of `node.runner: cuda` itself, without adapters."""
    config = LlamaConfig(
        hidden_size=shape.width, intermediate_size=shape.inner, num_attention_heads=shape.heads, num_hidden_layers=1,
        num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim, vocab_size=shape.vocab,
        max_position_embeddings=CONTEXT,
    )  # fmt: skip
    register_attention()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=ATTENTION)
    runner = TransformersRunner(model.eval().requires_grad_(False), BLOCK_TOKENS, 2, compiled=False)
    decoder = Decoder(runner, BLOCK_TOKENS, rows * CONTEXT // BLOCK_TOKENS)
    decoder.operations = TritonOperations()  # as on a GPU; elsewhere they are torch's
    table = without_memory(rows, CONTEXT // BLOCK_TOKENS, dtype=torch.int32)
    sequences, at = Rows(without_memory(rows, dtype=torch.int32), table), without_memory(rows, dtype=torch.int64)
    inputs = AttentionInputs(at, at, sequences, None, decoder.attention_scratch(rows, CONTEXT))
    hidden = decoder.begin(at)
    with recorded(CAPABILITY) as launches, ProductCount() as products:
        decoder.advance(hidden, decoder.layers, inputs)
    found: int = len(launches) + products.count
    return found


def step_row(shape: Shape, rows: int, adapted: str) -> dict[str, Any]:
    """One decode step: a layer's operations counted, the step as so many layers with embedding, last norm and head.
    Raises RuntimeError where the runner launches another number."""
    base = [count(part) for part in layer_parts(shape, rows)]
    wanted, found = sum(part["launches"] for part in base), runner_launches(shape, rows)
    if wanted != found:
        raise RuntimeError(f"{shape.name}, {rows} rows: the runner's layer has {found} launches, its parts {wanted}")
    adapters = [count(part) for part in adapter_parts(shape, rows, ADAPTED[adapted])]
    launches, moved = (sum(part[key] for part in base + adapters) for key in ("launches", "bytes"))
    head = shape.vocab * shape.width * ITEM + rows * (shape.vocab + 6 * shape.width) * ITEM
    weights = sum(d_in * sum(widths) for d_in, widths in shape.groups().values()) * ITEM
    kv = 2 * rows * CONTEXT * shape.kv_heads * shape.head_dim * ITEM
    adapter_bytes = sum(
        rows * RANK * (len(widths) * d_in + sum(widths)) * ITEM
        for d_in, widths in (shape.groups()[group] for group in ADAPTED[adapted])
    )
    return {
        "model": shape.name, "rows": rows, "context": CONTEXT, "adapted": adapted, "rank": RANK,
        "layer": base + adapters, "layer_launches": launches, "launches": shape.layers * launches + 3,
        "bytes": shape.layers * moved + head,
        "floor_bytes": shape.layers * (weights + kv + adapter_bytes) + shape.vocab * shape.width * ITEM,
    }  # fmt: skip
