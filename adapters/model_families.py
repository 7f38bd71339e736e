"""Families of base models that are served. Everything specific to a family is in its record here.

All families have decoder layers with projections q, k, v, o around attention, and gate, up, down around a gated
activation.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class ModelFamily(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of one `model_type` of config.json. Paths are of transformers' modules inside a decoder layer.
    Defaults are those of Llama."""

    model_type: str
    projections: tuple[str, ...] = (
        *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
        *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    )
    """Paths of the projections, in the order of adapters.base_model.PROJECTIONS."""
    layer_norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    """Paths of the RMS norms over the hidden state."""
    head_norms: tuple[str, ...] = ()
    """Paths of the RMS norms over each head of q and k, before the rotary embedding; empty: none."""
    other_modules: tuple[str, ...] = ("self_attn", "mlp", "mlp.act_fn")
    activation_key: str = "hidden_act"
    """Key of config.json that names the activation between gate and down."""
    window: Literal["none", "config", "layer"] = "none"
    """Source of the attention window: none, config.json for all layers, or each layer's attention module."""
    biased: tuple[str, ...] = ()
    """Names of projections that always have a bias."""
    bias_keys: dict[str, tuple[str, ...]] = {}
    """Keys of config.json that, when true, give the named projections a bias."""
    default_targets: tuple[str, ...] = ("q_proj", "v_proj")
    """Projections that PEFT adapts when a config names none; empty: PEFT requires the config to name some."""


ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings that our own engine computes: their frequencies do not depend on the lengths of sequences in the
batch."""
ATTENTION_BIAS: dict[str, tuple[str, ...]] = {"attention_bias": ("q", "k", "v", "o")}

LLAMA = ModelFamily(model_type="llama", bias_keys={**ATTENTION_BIAS, "mlp_bias": ("gate", "up", "down")})

FAMILIES = {
    family.model_type: family
    for family in (
        LLAMA,
        ModelFamily(model_type="mistral", window="config"),
        ModelFamily(model_type="qwen2", window="layer", biased=("q", "k", "v")),
        ModelFamily(
            model_type="qwen3",
            head_norms=("self_attn.q_norm", "self_attn.k_norm"),
            window="layer",
            bias_keys=ATTENTION_BIAS,
        ),
    )
}
"""Families by `model_type`."""
