"""Families of base models that are served. All that is known of a family is its record here.

Every family has decoder layers of q, k, v, o around attention and gate, up, down around a gated activation.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class ModelFamily(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of one `model_type` of config.json. Paths are those of transformers' modules inside a decoder layer;
    defaults are Llama's."""

    model_type: str
    projections: tuple[str, ...] = (
        *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
        *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    )
    """Paths in the order of adapters.base_model.PROJECTIONS."""
    layer_norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    """RMS norms as wide as the hidden state."""
    head_norms: tuple[str, ...] = ()
    """RMS norms over each head of q and of k, before they are rotated; empty: none."""
    other_modules: tuple[str, ...] = ("self_attn", "mlp", "mlp.act_fn")
    activation_key: str = "hidden_act"
    """The key of config.json that names the activation between gate and down."""
    window: Literal["none", "config", "layer"] = "none"
    """Source of the attention window: none, config.json for all layers, or each layer's attention module."""
    biased: tuple[str, ...] = ()
    """Names of projections that always have a bias."""
    bias_keys: dict[str, tuple[str, ...]] = {}
    """Keys of config.json that, when true, give the named projections a bias."""
    default_targets: tuple[str, ...] = ("q_proj", "v_proj")
    """Projections that PEFT adapts when a config names none; empty: PEFT requires the config to name some."""


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
"""Maps each `model_type` to its family."""
