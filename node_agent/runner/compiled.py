"""Replaces parts of decoder layers by modules with compiled CPU operators (kernels/decoder.cpp).

The layer's forward is not changed. Its norms, attention and MLP are modules, which are replaced in place after
`fuse_projections`. Parts that no operator can compute are kept. Without a compiler all parts are.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from adapters.model_families import FAMILIES
from kernels.build import unless_uncompiled
from kernels.decoder import SUFFIX, AttentionPass, DecoderOperators, Heads, PagedAttention, PagedCache
from node_agent.runner.attention import AttentionPlan, attend_chunks
from node_agent.runner.projections import FusedProjection
from node_agent.types import GROUPS, StepBatch

log = logging.getLogger(__name__)


def decoder_operators(device: torch.device, dtype: torch.dtype) -> DecoderOperators | None:
    """Returns the compiled operators; None if they can't be used. A compiler's failure is logged."""
    if device.type != "cpu" or dtype not in SUFFIX:
        return None
    warning = "the base runs without compiled operators, more slowly"
    return unless_uncompiled(lambda: DecoderOperators(dtype), log, warning)


class CompiledNorm(nn.Module):
    """RMS norm with compiled operators. All supported model families use it."""

    def __init__(self, norm: Any, operators: DecoderOperators) -> None:
        super().__init__()
        self.weight, self.eps, self.operators = norm.weight.data, norm.variance_epsilon, operators

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.operators.rms_norm(x, self.weight, self.eps)


class CompiledMlp(nn.Module):
    """MLP: down(silu(gate(x)) * up(x))."""

    def __init__(self, gate_up: FusedProjection, down: FusedProjection, operators: DecoderOperators) -> None:
        super().__init__()
        self.gate_up, self.down, self.operators = gate_up, down, operators

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [1, T, d] for x [1, T, d]."""
        return self.down.product(self.operators.silu_mul(self.gate_up.product(x[0]))).unsqueeze(0)


class CompiledAttention(nn.Module):
    """Attention with projections and compiled operators; prompt chunks attend by torch's function."""

    def __init__(
        self, qkv: FusedProjection, o: FusedProjection, cache: PagedCache, operators: DecoderOperators
    ) -> None:
        super().__init__()
        self.qkv, self.o = qkv, o
        self.cache, self.paged = cache, PagedAttention(operators, cache)

    def forward(
        self, hidden_states: torch.Tensor, garnish_plan: AttentionPlan, **_: object
    ) -> tuple[torch.Tensor, None]:
        """Returns [1, T, d] for hidden_states [1, T, d]."""
        plan, heads = garnish_plan, self.cache.heads
        assert plan.compiled is not None
        qkv = self.qkv.product(hidden_states[0])
        out = self.paged(qkv, plan.compiled)
        if plan.chunks:
            width = heads.heads * heads.head_dim
            query = qkv[:, :width].view(1, -1, heads.heads, heads.head_dim).transpose(1, 2)
            done = out.view(-1, heads.heads, heads.head_dim)
            attend_chunks(plan, query, self.cache.keys, self.cache.values, done, heads.scaling, heads.window)
        return self.o.product(out).unsqueeze(0), None


def compile_layers(
    model: Any, operators: DecoderOperators, keys: list[torch.Tensor], values: list[torch.Tensor], block_tokens: int
) -> Heads | None:
    """Replaces the parts of a model that the operators can compute. The model's projections must be fused.

    Returns the attention heads of a layer, which are the same in all layers; None if attention was not replaced.
    """
    config, family, heads = model.config, FAMILIES[model.config.model_type], None
    attention_path, mlp_path = (family.projections[i].rpartition(".")[0] for i in (0, 4))
    for layer, layer_keys, layer_values in zip(model.model.layers, keys, values, strict=True):
        for path in family.layer_norms:
            layer.set_submodule(path, CompiledNorm(layer.get_submodule(path), operators))
        qkv, o, gate_up, down = (layer.get_submodule(family.projections[group[0]]) for group in GROUPS.values())
        if getattr(config, family.activation_key) == "silu":
            layer.set_submodule(mlp_path, CompiledMlp(gate_up, down, operators))
        layer_shape = layer_heads(layer, layer.get_submodule(attention_path), config, *layer_keys.shape[1:])
        if layer_shape.covered:
            heads = layer_shape
            cache = PagedCache(heads, layer_keys, layer_values, block_tokens)
            layer.set_submodule(attention_path, CompiledAttention(qkv, o, cache, operators))
    model.model.norm = CompiledNorm(model.model.norm, operators)
    return heads


def layer_heads(layer: Any, attention: Any, config: Any, kv_heads: int, head_dim: int) -> Heads:
    """Returns the shape and scaling of a layer's attention, read from the config, the module and the heads' norms."""
    family = FAMILIES[config.model_type]
    window = getattr({"config": config, "layer": attention}.get(family.window), "sliding_window", None)
    norms, eps = None, 0.0
    if family.head_norms:
        of_q, of_k = (layer.get_submodule(path) for path in family.head_norms)
        norms, eps = (of_q.weight.data, of_k.weight.data), of_q.variance_epsilon
    return Heads(config.num_attention_heads, kv_heads, head_dim, attention.scaling, window, norms, eps)


def compiled_pass(batch: StepBatch, rotary: tuple[torch.Tensor, torch.Tensor], heads: Heads) -> AttentionPass:
    """Returns the arguments of compiled attention for a pass. `rotary`: the model's cos and sin, each [1, T, head
    dim]."""
    cos, sin = rotary
    slots = batch.slot_mapping[: batch.n_tokens]
    return AttentionPass(
        *(cos[0].contiguous(), sin[0].contiguous(), slots, batch.block_table, batch.context_len),
        *(batch.context_lens, batch.n_decode, heads),
    )
