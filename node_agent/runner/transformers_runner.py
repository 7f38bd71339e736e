"""Runs a Llama-like model of Hugging Face over a paged KV cache, on a CPU or a GPU.

The model's decoder layers are called one by one, so that a pass can stop between them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from adapters.base_model import head_dim, projection_widths
from adapters.model_families import FAMILIES, ROPE_TYPES
from node_agent.device import record_event
from node_agent.device_event import ENDED, Event
from node_agent.runner.attention import paged_attention, plan_attention
from node_agent.runner.compiled import compile_layers, compiled_pass, decoder_operators
from node_agent.runner.product_choice import choose_products
from node_agent.runner.products import Linear
from node_agent.runner.projections import Current, fuse_projections, layer_weights
from node_agent.runner.sampler import step_output
from node_agent.types import PassLora, RunnerSettings, StepBatch, StepOutput

ATTENTION = "garnish_paged"
LoadModel = Callable[[Path, torch.device, torch.dtype | None], PreTrainedModel]


def register_attention() -> None:
    """Registers `paged_attention` with transformers, under the name ATTENTION."""
    AttentionInterface.register(ATTENTION, paged_attention)
    AttentionMaskInterface.register(ATTENTION, _no_mask)


def load_model(model_dir: Path, device: torch.device, dtype: torch.dtype | None) -> PreTrainedModel:
    """Loads the base model for a TransformersRunner. `dtype` None: the dtype in the model's files. Raises ValueError if
    the runner can't compute the model."""
    register_attention()
    config = AutoConfig.from_pretrained(model_dir)
    if config.model_type not in FAMILIES:
        raise ValueError(f"{model_dir}: model_type {config.model_type!r} is not served")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in ROPE_TYPES:
        raise ValueError(f"{model_dir}: rope_type {rope!r} is not served; served: {', '.join(ROPE_TYPES)}")
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=dtype or "auto", attn_implementation=ATTENTION, local_files_only=True
    )
    return model.eval().requires_grad_(False).to(device)


def open_runner(settings: RunnerSettings, load: LoadModel = load_model) -> TransformersRunner:
    """Opens the runner, as an OpenRunner. `load` loads the model to the device."""
    model = load(settings.model_dir, settings.device, settings.dtype)
    return TransformersRunner(model, settings.block_tokens, settings.num_blocks(model.dtype))


class TransformersRunner:
    """ModelRunner whose `num_blocks` KV blocks of `block_tokens` are allocated at once."""

    name = "transformers"

    def __init__(self, model: PreTrainedModel, block_tokens: int, num_blocks: int, compiled: bool = True) -> None:
        """`compiled`: whether to replace not only the projections but also other parts of the model by compiled ones,
        where possible."""
        self.model: Any = model
        device = model.device
        self.device, self.dtype = device, model.dtype
        self.layers = list(self.model.model.layers)
        self.num_layers = len(self.layers)
        self.block_tokens, self.num_blocks = block_tokens, num_blocks
        self.current = Current()
        family = FAMILIES[model.config.model_type]
        self.products = choose_products(weight for layer in self.layers for weight in layer_weights(layer, family))
        for index, layer in enumerate(self.layers):
            fuse_projections(layer, index, self.current, family, self.products)
        head = self.model.lm_head
        self.head = Linear(head.weight.data, None if head.bias is None else head.bias.data, self.products)
        config, slots = model.config.to_dict(), num_blocks * block_tokens
        shape = (slots, projection_widths(config)[1][1] // head_dim(config), head_dim(config))
        self.keys = [torch.zeros(shape, dtype=self.dtype, device=device) for _ in self.layers]
        self.values = [torch.zeros(shape, dtype=self.dtype, device=device) for _ in self.layers]
        operators = decoder_operators(device, self.dtype) if compiled else None
        self.heads = None
        """shape of a layer's attention heads, if decode attention is compiled; else None"""
        if operators is not None:
            self.heads = compile_layers(self.model, operators, self.keys, self.values, block_tokens)

    def start(self, batch: StepBatch, lora: PassLora | None) -> TransformersPass:
        return TransformersPass(self, batch, lora)


class TransformersPass:
    """Pass of a StepBatch."""

    stretch = 1

    @torch.inference_mode()
    def __init__(self, runner: TransformersRunner, batch: StepBatch, lora: PassLora | None) -> None:
        self.runner, self.batch, self.lora, self.layer = runner, batch, lora, 0
        model = runner.model.model
        self.hidden = model.embed_tokens(batch.token_ids[: batch.n_tokens].unsqueeze(0))
        self.positions = batch.positions[: batch.n_tokens].unsqueeze(0)
        self.rotary = model.rotary_emb(self.hidden, position_ids=self.positions)
        compiled = None if runner.heads is None else compiled_pass(batch, self.rotary, runner.heads)
        wide = runner.products is not None and runner.products.wide_attention
        self.plan = plan_attention(batch, runner.keys, runner.values, runner.block_tokens, compiled, wide)

    @torch.inference_mode()
    def advance(self, to_layer: int) -> None:
        self.runner.current.lora = self.lora
        for layer in self.runner.layers[self.layer : to_layer]:
            self.hidden = layer(
                self.hidden,
                attention_mask=None,
                position_ids=self.positions,
                position_embeddings=self.rotary,
                garnish_plan=self.plan,
            )
        self.layer = max(self.layer, to_layer)
        self.runner.current.lora = None

    def finish(self) -> StepOutput:
        return step_output(self.logits_of, self.batch)

    def logits(self) -> torch.Tensor:
        """Returns logits [Q, V] of `logit_rows`, in the model's dtype, after the last layer."""
        return self.logits_of(self.batch.logit_rows)

    @torch.inference_mode()
    def logits_of(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns logits [n, V] of the tokens rows i64[n], in the model's dtype."""
        if self.layer != self.runner.num_layers:
            raise RuntimeError(f"logits were requested after {self.layer} of {self.runner.num_layers} layers")
        model = self.runner.model
        logits: torch.Tensor
        if rows.shape[0]:
            logits = self.runner.head(model.model.norm(self.hidden[0].index_select(0, rows)))
        else:
            logits = self.hidden.new_empty(0, model.config.vocab_size)
        return logits

    def abort(self) -> Event:
        self.hidden = self.hidden[:, :0]
        return record_event(self.runner.device) if self.layer else ENDED


def _no_mask(*_: object, **__: object) -> None:
    """Returns None: the attention function builds masks from the paged layout."""
    return None
