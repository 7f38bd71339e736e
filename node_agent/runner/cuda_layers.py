"""Decoder layers of `node.runner: cuda`: the model's fused products, with `kernels.gpu_ops` between them.

The residual stream is added to in the next norm, so a layer has four base products, two norms, a rotation, attention
and a gate.
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
    """Weight [width] and epsilon of an RMS norm."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True)
class Layer:
    """Weights and norms of one decoder layer, with its part of the KV cache."""

    attention_norm: Norm
    qkv: FusedProjection
    cache: PagedCache
    o: FusedProjection
    mlp_norm: Norm
    gate_up: FusedProjection
    down: FusedProjection

    def projection(self, group: str) -> FusedProjection:
        """Returns the projection of a group of GROUPS."""
        projection: FusedProjection = getattr(self, group)
        return projection


@dataclass(frozen=True)
class AttentionInputs:
    """Arguments of a pass's attention. Decode rows come first, one token each, then prompt chunks."""

    positions: torch.Tensor
    """i64[T]"""
    slots: torch.Tensor
    """i64[T]: cache slots of the tokens; -1 is padding"""
    decode: Rows | None
    """decode rows, if there are any"""
    chunks: Rows | None
    """prompt chunks, if there are any"""
    scratch: torch.Tensor | None
    """scratch memory of decode attention; None if there are no decode rows"""


@dataclass
class HiddenState:
    """Hidden state between two layers of a pass: `residual + added`. `added` is None before the first layer."""

    residual: torch.Tensor
    """[T, width]"""
    added: torch.Tensor | None = None

    def take(self, group: str, y: torch.Tensor) -> None:
        """Stores the output of a projection group. Outputs of `o` and `down` are added to the residual stream later."""
        if group in ("o", "down"):
            self.added = y


def layer_operations(device: torch.device) -> LayerOperations:
    """Returns Triton's operations on a CUDA device, plain torch's elsewhere."""
    if device.type == "cuda":
        from kernels.gpu_triton import TritonOperations  # a host without a GPU need not load Triton

        return TritonOperations()
    return TorchOperations()


class Decoder:
    """The layers of a model, with a separate KV cache. Raises ValueError for parts that no operation computes."""

    def __init__(self, model: TransformersRunner, block_tokens: int, num_blocks: int) -> None:
        """Shares the weights of `model`, a runner whose projections are fused and not compiled."""
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

    def attention_scratch(self, rows: int, max_context: int) -> torch.Tensor:
        """Allocates scratch memory for the attention of `rows` decode rows with contexts of at most `max_context`
        tokens."""
        return decode_scratch(rows, self.layers[0].cache.heads, max_context, self.norm.weight.device)

    def begin(self, token_ids: torch.Tensor) -> HiddenState:
        """Returns the hidden state before the first layer, of token_ids i64[T]."""
        return HiddenState(self.embed_tokens(token_ids))

    def advance(self, hidden: HiddenState, layers: Sequence[Layer], inputs: AttentionInputs) -> None:
        """Computes these layers of a pass, and updates the hidden state in place."""
        for layer in layers:
            y = None
            for group in GROUPS:
                y = layer.projection(group).product(self.input_of(group, layer, hidden, y, inputs))
                hidden.take(group, y)

    def input_of(
        self, group: str, layer: Layer, hidden: HiddenState, y: torch.Tensor | None, inputs: AttentionInputs
    ) -> torch.Tensor:
        """Returns the input [T, d_in] of a projection group. `y`: output of the layer's group before it, or None."""
        if group == "qkv":
            return self._normed(hidden, layer.attention_norm)
        assert y is not None
        if group == "o":
            return self._attention(layer, y, inputs)
        if group == "gate_up":
            return self._normed(hidden, layer.mlp_norm)
        gated = y.new_empty(y.shape[0], y.shape[1] // 2)
        self.operations.silu_mul(y, out=gated)
        return gated

    def logits(self, hidden: HiddenState, rows: torch.Tensor | None) -> torch.Tensor:
        """Returns logits [n, V] in the model's dtype, after the last layer. `rows`: i64[n], indices of the tokens;
        None: all tokens, which makes `hidden` unusable."""
        assert hidden.added is not None
        if rows is not None:
            hidden = HiddenState(hidden.residual.index_select(0, rows), hidden.added.index_select(0, rows))
        logits: torch.Tensor = self.head(self._normed(hidden, self.norm))
        return logits

    def _normed(self, hidden: HiddenState, norm: Norm) -> torch.Tensor:
        """Adds `added` to the residual stream, and returns the norm of the sum."""
        out = torch.empty_like(hidden.residual)
        if hidden.added is None:
            self.operations.add_rms_norm(hidden.residual, norm.weight, norm.eps, out=out, residual=None)
        else:
            self.operations.add_rms_norm(hidden.added, norm.weight, norm.eps, out=out, residual=hidden.residual)
            hidden.added = None
        return out

    def _attention(self, layer: Layer, qkv: torch.Tensor, inputs: AttentionInputs) -> torch.Tensor:
        cache, operations = layer.cache, self.operations
        operations.rotate_and_store(qkv, self.rotary, cache, positions=inputs.positions, slots=inputs.slots)
        out = qkv.new_empty(qkv.shape[0], cache.heads.heads * cache.heads.head_dim)
        if inputs.decode is not None:
            assert inputs.scratch is not None
            rows = inputs.decode.context_len.shape[0]
            operations.decode_attention(qkv[:rows], cache, inputs.decode, out=out[:rows], scratch=inputs.scratch)
        if inputs.chunks is not None:
            operations.prefill_attention(qkv, cache, inputs.chunks, out=out)
        return out


class CudaModel:
    """Model, device and KV cache that the passes of a runner share.

    `num_blocks` KV blocks of `block_tokens` are allocated at once.
    """

    def __init__(self, model: TransformersRunner, stream: Stream, block_tokens: int, num_blocks: int) -> None:
        """Shares the weights of `model`, which is not compiled, but not its KV cache."""
        self.device, self.dtype, self.products = model.device, model.dtype, model.products
        self.num_layers, self.block_tokens, self.num_blocks = model.num_layers, block_tokens, num_blocks
        self.vocab: int = model.model.config.vocab_size
        self.current, self.stream = model.current, stream
        self.decoder = Decoder(model, block_tokens, num_blocks)

    def check_complete(self, layer: int) -> None:
        """Raises RuntimeError for a pass that has not computed all layers."""
        if layer != self.num_layers:
            raise RuntimeError(f"logits were requested after {layer} of {self.num_layers} layers")


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
    attention_norm, mlp_norm = (_norm(layer.get_submodule(path)) for path in family.layer_norms)
    return Layer(attention_norm, qkv, PagedCache(heads, keys, values, block_tokens), o, mlp_norm, gate_up, down)


def _norm(module: Any) -> Norm:
    return Norm(module.weight.data, module.variance_epsilon)


@torch.inference_mode()
def rotary_table(model: Any) -> Rotary:
    """Returns the model's cos and sin for all positions of its context."""
    positions = torch.arange(model.config.max_position_embeddings, device=model.device)[None]
    like = torch.empty(1, dtype=model.dtype, device=model.device)
    cos, sin = model.model.rotary_emb(like, position_ids=positions)
    half = cos.shape[-1] // 2
    return Rotary(cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous())
