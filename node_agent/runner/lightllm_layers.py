"""LightLLM's Llama layers (lightllm 0.0.1) with LoRA around their products.

LightLLM's server, scheduler and memory managers are not used: a pass has its own state, and the runner owns the KV
cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightllm.models.llama.infer_struct import LlamaInferStateInfo
from lightllm.models.llama.layer_infer.transformer_layer_infer import LlamaTransformerLayerInfer
from lightllm.models.llama.model import LlamaTpPartModel
from lightllm.models.llama.triton_kernel.rotary_emb import rotary_emb_fwd
from lightllm.models.llama.triton_kernel.silu_and_mul import silu_and_mul_fwd
from safetensors.torch import load_file
from transformers import AutoConfig

from node_agent.types import PassLora

HEAD_DIMS = (16, 32, 64, 128, 256)
"""Head dimensions of LightLLM's attention kernels."""

DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class TokenTable:
    """Substitute for LightLLM's ReqManager, of which layers read one attribute."""

    req_to_token_indexs: torch.Tensor
    """i64[R, context]: cache slot of each position; not i32, since kernels multiply it by a slot's width"""


@dataclass(frozen=True)
class KvMemory:
    """Substitute for LightLLM's MemoryManager, of which layers read one attribute."""

    kv_buffer: list[torch.Tensor]
    """[slots, 2 * kv heads, head dim] by layer, keys before values"""


class PassState(LlamaInferStateInfo):  # type: ignore[misc]  # LightLLM has no types
    """State of a pass for LightLLM's layers, with the pass's LoRA."""

    lora: PassLora | None = None

    def lora_of(self, layer: int, group: str, x: torch.Tensor) -> PassLora | None:
        """Begins the pass's LoRA for a group and returns it. Returns None if the group has no LoRA term."""
        return self.lora if self.lora is not None and self.lora.begin(layer, group, x) else None


class LoraLayerInfer(LlamaTransformerLayerInfer):  # type: ignore[misc]  # LightLLM has no types
    """Decoder layer whose `token_forward` computes passes with and without prompts.

    LightLLM's `context_forward` differs in the attention kernel, and waits for the device before and after each half of
    a layer, which `Pass.advance` must not do.
    """

    def _bind_attention(self) -> None:
        super()._bind_attention()
        self._decode_kernel: Any = self._token_attention_kernel  # type: ignore[has-type]
        self._token_attention_kernel = self._attend

    def _attend(self, q: torch.Tensor, state: PassState, weight: Any, out: torch.Tensor | None = None) -> Any:
        if state.is_prefill:
            return self._context_attention_kernel(q, None, state, weight, out)  # reads keys and values from the cache
        return self._decode_kernel(q, state, weight, out)

    def _get_qkv(
        self, x: torch.Tensor, cache_kv: torch.Tensor, state: PassState, weight: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns rotated q [T, heads * head dim], and cache_kv [T, 2 * kv heads, head dim]. x is [T, hidden]."""
        kv = cache_kv.view(x.shape[0], -1)
        lora = state.lora_of(self.layer_num_, "qkv", x)
        q = torch.mm(x, weight.q_weight_)
        torch.mm(x, weight.kv_weight_, out=kv)
        if lora is not None:
            lora.finish(self.layer_num_, "qkv", [q, *kv.chunk(2, dim=1)])
        keys = cache_kv[:, : self.tp_k_head_num_]
        heads = q.view(-1, self.tp_q_head_num_, self.head_dim_)
        rotary_emb_fwd(heads, keys, state.position_cos, state.position_sin)
        return q, cache_kv

    def _get_o(self, x: torch.Tensor, state: PassState, weight: Any) -> torch.Tensor:
        return self._product(state, "o", x, weight.o_weight_, 1)

    def _ffn(self, x: torch.Tensor, state: PassState, weight: Any) -> torch.Tensor:
        gate_up = self._product(state, "gate_up", x, weight.gate_up_proj, 2)
        return self._product(state, "down", silu_and_mul_fwd(gate_up), weight.down_proj, 1)

    def _product(self, state: PassState, group: str, x: torch.Tensor, weight: torch.Tensor, parts: int) -> torch.Tensor:
        """Returns x [T, d_in] @ weight [d_in, parts * d_out] plus the LoRA of its parts."""
        lora = state.lora_of(self.layer_num_, group, x)
        y = torch.mm(x, weight)
        if lora is not None:
            lora.finish(self.layer_num_, group, y.chunk(parts, dim=1))
        return y


class LightllmModel(LlamaTpPartModel):  # type: ignore[misc]  # LightLLM has no types
    """Weights, rotary table and layers on the device, without a cache and requests."""

    transformer_layer_infer_class = LoraLayerInfer
    infer_state_class = PassState

    def __init__(self, config: dict[str, Any], weights: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
        self.config = config
        name = str(dtype).removeprefix("torch.")
        arguments = {"tp_rank": 0, "world_size": 1, "weight_dir": "", "max_total_token_num": 0}
        super().__init__({**arguments, "weight_dict": weights, "data_type": name})
        self.weight_dict = None  # the copy in host memory

    def _init_config(self) -> None:
        """Keeps the given config. LightLLM would read config.json itself, in the format of older transformers
        versions."""

    def _init_mem_manager(self) -> None:
        self.mem_manager = None

    def _init_req_manager(self) -> None:
        self.req_manager = None


def load_lightllm_model(model_dir: Path, dtype: torch.dtype | None) -> LightllmModel:
    """Loads the base model to the first GPU. `dtype` None: the model's.

    Raises ValueError for a model that LightLLM would compute wrongly, or not at all.
    """
    weights: dict[str, torch.Tensor] = {}
    config = AutoConfig.from_pretrained(model_dir)
    dtype = checked_dtype(model_dir, config, dtype)
    for file in sorted(model_dir.glob("*.safetensors")):
        weights.update(load_file(file))
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    return LightllmModel(lightllm_config(config), weights, dtype)


def checked_dtype(model_dir: Path, config: Any, dtype: torch.dtype | None) -> torch.dtype:
    """Returns the dtype to compute in. Raises ValueError with the features of the base model that LightLLM lacks."""
    dtype = dtype or config.dtype or torch.float32
    problems = _problems(config, dtype)
    if problems:
        raise ValueError(f"{model_dir}: runner lightllm can't serve it: {'; '.join(problems)}")
    return dtype


def _problems(config: Any, dtype: torch.dtype) -> Sequence[str]:
    if config.model_type != "llama":
        return [f"model_type {config.model_type!r} is not llama"]
    problems = []
    if dtype not in DTYPES:
        problems.append(f"dtype {dtype} is neither float16 nor bfloat16 (node.dtype sets it)")
    head_dim = config.hidden_size // config.num_attention_heads
    if config.head_dim != head_dim or head_dim not in HEAD_DIMS:
        problems.append(f"head_dim {config.head_dim} must be hidden_size / heads = {head_dim}, and one of {HEAD_DIMS}")
    if config.attention_bias or config.mlp_bias:
        problems.append("projections have biases")
    if config.hidden_act != "silu":
        problems.append(f"hidden_act {config.hidden_act!r} is not silu")
    rope = config.rope_parameters["rope_type"]
    if rope != "default":
        problems.append(f"rope_type {rope!r} is not default")
    return problems


def lightllm_config(config: Any) -> dict[str, Any]:
    """Returns the config that LightLLM's classes read; some keys are in it under two names."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    same = {name: getattr(config, name) for name in (*names, "rms_norm_eps", "max_position_embeddings")}
    return {
        **same,
        "num_key_value_heads": config.num_key_value_heads,
        "n_embed": config.hidden_size,
        "n_layer": config.num_hidden_layers,
        "rope_theta": config.rope_parameters["rope_theta"],
    }
