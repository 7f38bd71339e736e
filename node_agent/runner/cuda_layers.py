"""A decoder's layers as `node.runner: cuda` walks them: the model's fused products, and `kernels.gpu_ops` between them.

The residual stream is summed where the next norm reads it, so a layer is three products of the base, two norms, a
rotation, attention, and a gate, each with as few launches as its operation says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from adapters.model_families import FAMILIES
from kernels.decoder import PagedCache
from kernels.gpu_ops import LayerOperations, Rotary, Rows, decode_scratch
from kernels.gpu_reference import TorchOperations
from node_agent.runner.compiled import layer_heads
from node_agent.runner.cuda_stream import Stream
from node_agent.runner.projections import FusedProjection
from node_agent.runner.transformers_runner import TransformersRunner
from node_agent.types import GROUPS


@dataclass(frozen=True)
class Norm:
    """An RMS norm."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True)
class Layer:
    """One decoder layer with its part of the KV cache."""

    attention_norm: Norm
    qkv: FusedProjection
    cache: PagedCache
    o: FusedProjection
    mlp_norm: Norm
    gate_up: FusedProjection
    down: FusedProjection

    def projection(self, group: str) -> FusedProjection:
        """Returns the projection group of that name, one of GROUPS."""
        found: FusedProjection = getattr(self, group)
        return found


@dataclass(frozen=True)
class Attended:
    """Which tokens of a pass attend to what. Decode rows come first, one token each, then prompt chunks."""

    positions: torch.Tensor
    """i64[T]"""
    slots: torch.Tensor
    """i64[T]: where keys and values go; -1 is padding"""
    decode: Rows | None
    """None: no row decodes"""
    chunks: Rows | None
    """None: every row decodes"""
    scratch: torch.Tensor | None
    """of the decode rows' attention"""


@dataclass
class Walk:
    """How far a pass has come. The hidden state is `residual + added`; `added` is None before the first layer."""

    residual: torch.Tensor
    """[T, width]"""
    added: torch.Tensor | None = None

    def take(self, group: str, y: torch.Tensor) -> None:
        """Takes in the output of a projection group: those of `o` and `down` go to the residual stream."""
        if group in ("o", "down"):
            self.added = y


def layer_operations(device: torch.device) -> LayerOperations:
    """Returns Triton's operations on a CUDA device, plain torch's elsewhere."""
    if device.type == "cuda":
        from kernels.gpu_triton import TritonOperations  # a host without a GPU need not load Triton

        return TritonOperations()
    return TorchOperations()


class Decoder:
    """All layers, over keys and values of their own. Raises ValueError for a model whose parts no operation covers."""

    def __init__(self, model: TransformersRunner, block_tokens: int, num_blocks: int) -> None:
        """`model`: a runner whose projections are fused and not compiled; its weights are shared."""
        self.operations: LayerOperations = layer_operations(model.device)
        inner, family = model.model.model, FAMILIES[model.model.config.model_type]
        self.embed_tokens, self.head = inner.embed_tokens, model.head
        self.norm = _norm(inner.norm)
        activation = getattr(model.model.config, family.activation_key)
        if activation != "silu":
            raise ValueError(f"node.runner: cuda computes silu, not the model's {activation}; use transformers")
        shape = (num_blocks * block_tokens, *model.keys[0].shape[1:])
        self.layers = [_layer(model, layer, shape, block_tokens) for layer in model.layers]
        self.rotary = rotary_table(model.model)

    def attended_scratch(self, rows: int, max_context: int) -> torch.Tensor:
        """Returns the scratch for attention of so many decode rows."""
        return decode_scratch(rows, self.layers[0].cache.heads, max_context, self.norm.weight.device)

    def begin(self, token_ids: torch.Tensor) -> Walk:
        """token_ids i64[T]"""
        return Walk(self.embed_tokens(token_ids))

    def advance(self, walk: Walk, layers: Sequence[Layer], attended: Attended) -> None:
        """Computes some layers, which must be the next ones."""
        for layer in layers:
            y = None
            for group in GROUPS:
                y = layer.projection(group).product(self.input_of(group, layer, walk, y, attended))
                walk.take(group, y)

    def input_of(
        self, group: str, layer: Layer, walk: Walk, y: torch.Tensor | None, attended: Attended
    ) -> torch.Tensor:
        """Returns the input [T, d_in] of a projection group. `y` is the output of the group before it in the layer;
        None for the first one."""
        if group == "qkv":
            return self._normed(walk, layer.attention_norm)
        assert y is not None
        if group == "o":
            return self._attention(layer, y, attended)
        if group == "gate_up":
            return self._normed(walk, layer.mlp_norm)
        gated = y.new_empty(y.shape[0], y.shape[1] // 2)
        self.operations.silu_mul(y, out=gated)
        return gated

    def logits(self, walk: Walk, rows: torch.Tensor | None) -> torch.Tensor:
        """[n, V] in the model's dtype, of the tokens `rows` i64[n]; None: of all, and the walk is used up. All layers
        must have been advanced."""
        assert walk.added is not None
        if rows is not None:
            walk = Walk(walk.residual.index_select(0, rows), walk.added.index_select(0, rows))
        found: torch.Tensor = self.head(self._normed(walk, self.norm))
        return found

    def _normed(self, walk: Walk, norm: Norm) -> torch.Tensor:
        """Adds what is to be added to the residual stream, and returns the norm of the sum."""
        out = torch.empty_like(walk.residual)
        if walk.added is None:
            self.operations.add_rms_norm(walk.residual, norm.weight, norm.eps, out=out, residual=None)
        else:
            self.operations.add_rms_norm(walk.added, norm.weight, norm.eps, out=out, residual=walk.residual)
            walk.added = None
        return out

    def _attention(self, layer: Layer, qkv: torch.Tensor, attended: Attended) -> torch.Tensor:
        cache, operations = layer.cache, self.operations
        operations.rotate_and_store(qkv, self.rotary, cache, positions=attended.positions, slots=attended.slots)
        out = qkv.new_empty(qkv.shape[0], cache.heads.heads * cache.heads.head_dim)
        if attended.decode is not None:
            assert attended.scratch is not None
            rows = attended.decode.context_len.shape[0]
            operations.decode_attention(qkv[:rows], cache, attended.decode, out=out[:rows], scratch=attended.scratch)
        if attended.chunks is not None:
            operations.prefill_attention(qkv, cache, attended.chunks, out=out)
        return out


class CudaModel:
    """A base model as passes compute with it. `num_blocks` of `block_tokens` tokens are allocated at once and kept."""

    def __init__(self, model: TransformersRunner, stream: Stream, block_tokens: int, num_blocks: int) -> None:
        """`model` is not compiled; its weights are shared, its KV cache is not."""
        self.device, self.dtype, self.products = model.device, model.dtype, model.products
        self.num_layers, self.block_tokens, self.num_blocks = model.num_layers, block_tokens, num_blocks
        self.vocab: int = model.model.config.vocab_size
        self.current, self.stream = model.current, stream
        self.decoder = Decoder(model, block_tokens, num_blocks)

    def check_complete(self, layer: int) -> None:
        """Raises RuntimeError for a pass that stands before the last layer's end."""
        if layer != self.num_layers:
            raise RuntimeError(f"logits wanted after {layer} of {self.num_layers} layers")


def _layer(model: TransformersRunner, layer: Any, shape: tuple[int, ...], block_tokens: int) -> Layer:
    config = model.model.config
    family = FAMILIES[config.model_type]
    qkv, o, gate_up, down = (layer.get_submodule(family.projections[group[0]]) for group in GROUPS.values())
    attention = layer.get_submodule(family.projections[0].rpartition(".")[0])
    heads = layer_heads(layer, attention, config, *shape[1:])
    if not heads.covered:
        shape_text = f"{heads.heads} heads of {heads.head_dim} over {heads.kv_heads}"
        raise ValueError(f"node.runner: cuda can't compute {shape_text}; use transformers")
    keys, values = (torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in range(2))
    before, after = (_norm(layer.get_submodule(path)) for path in family.layer_norms)
    return Layer(before, qkv, PagedCache(heads, keys, values, block_tokens), o, after, gate_up, down)


def _norm(module: Any) -> Norm:
    return Norm(module.weight.data, module.variance_epsilon)


@torch.inference_mode()
def rotary_table(model: Any) -> Rotary:
    """The model's own cos and sin of every position that it was made for."""
    positions = torch.arange(model.config.max_position_embeddings, device=model.device)[None]
    like = torch.empty(1, dtype=model.dtype, device=model.device)
    cos, sin = model.model.rotary_emb(like, position_ids=positions)
    half = cos.shape[-1] // 2
    return Rotary(cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous())
