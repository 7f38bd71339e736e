"""ModelRunner with LightLLM's layers and Triton attention, for NVIDIA GPUs: the engine of the papers.

It has not run on a GPU; it is tested in Triton's interpreter (docs/design/seams.md).
"""

from __future__ import annotations

import torch

from node_agent.device import record_event
from node_agent.device_event import ENDED, Event
from node_agent.runner.lightllm_device import on_device
from node_agent.runner.lightllm_layers import KvMemory, LightllmModel, PassState, TokenTable
from node_agent.runner.sampler import step_output
from node_agent.types import PassLora, StepBatch, StepOutput


class LightllmRunner:
    """ModelRunner whose `num_blocks` KV blocks of `block_tokens` are allocated at once."""

    name = "lightllm"

    def __init__(self, model: LightllmModel, block_tokens: int, num_blocks: int) -> None:
        self.model = model
        self.device: torch.device = model.pre_post_weight.wte_weight_.device
        self.dtype: torch.dtype = model.data_type
        self.num_layers: int = model.layers_num
        self.block_tokens, self.num_blocks = block_tokens, num_blocks
        self.products = None
        self.kv_shape = 2 * model.tp_k_head_num_, model.head_dim_
        slots = num_blocks * block_tokens
        self.memory = KvMemory(
            [torch.zeros(slots, *self.kv_shape, dtype=self.dtype, device=self.device) for _ in range(self.num_layers)]
        )

    def start(self, batch: StepBatch, lora: PassLora | None) -> LightllmPass:
        return LightllmPass(self, batch, lora)


class LightllmPass:
    """Pass of a StepBatch. LightLLM's decode kernel takes no prompt chunks, so in a batch with chunks a decode row is
    computed as a chunk of one token."""

    stretch = 1

    @torch.inference_mode()
    def __init__(self, runner: LightllmRunner, batch: StepBatch, lora: PassLora | None) -> None:
        self.runner, self.batch, self.layer = runner, batch, 0
        self.state: PassState | None = pass_state(runner, batch, lora)
        model = runner.model
        tokens = batch.token_ids[: batch.n_tokens]
        with on_device(runner.device):
            self.hidden: torch.Tensor | None = model.pre_infer.token_forward(tokens, self.state, model.pre_post_weight)

    @torch.inference_mode()
    def advance(self, to_layer: int) -> None:
        if self.hidden is None:
            raise RuntimeError("a pass that has ended was advanced")
        model = self.runner.model
        with on_device(self.runner.device):
            for index in range(self.layer, to_layer):
                weights = model.trans_layers_weight[index]
                self.hidden = model.layers_infer[index].token_forward(self.hidden, self.state, weights)
        self.layer = max(self.layer, to_layer)

    def finish(self) -> StepOutput:
        return step_output(self.logits_of, self.batch)

    @torch.inference_mode()
    def logits_of(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns logits f32[n, V] of the tokens rows i64[n], after the last layer."""
        if self.hidden is None or self.layer != self.runner.num_layers:
            raise RuntimeError(f"logits were requested after {self.layer} of {self.runner.num_layers} layers")
        model = self.runner.model
        if not rows.shape[0]:
            return self.hidden.new_empty(0, model.vocab_size, dtype=torch.float32)
        head_state = PassState()  # as in a decode pass: one row of hidden states per row of logits
        head_state.is_prefill, head_state.batch_size = False, rows.shape[0]
        hidden = self.hidden.index_select(0, rows)
        with on_device(self.runner.device):
            logits: torch.Tensor = model.post_infer.token_forward(
                hidden, head_state, model.pre_post_weight, return_logics=True
            )
        return logits

    def abort(self) -> Event:
        self.hidden = self.state = None
        return record_event(self.runner.device) if self.layer else ENDED


def pass_state(runner: LightllmRunner, batch: StepBatch, lora: PassLora | None) -> PassState:
    """Returns LightLLM's state for a StepBatch, without the copies to the host that LightLLM's model makes."""
    state, model = PassState(), runner.model
    state.lora = lora
    state.mem_manager, state.req_manager = runner.memory, TokenTable(_slots(batch, runner.block_tokens))
    state.mem_is_contiguous, state.mem_index = False, batch.slot_mapping[: batch.n_tokens]
    state.kv_buffer = torch.empty(batch.n_tokens, *runner.kv_shape, dtype=runner.dtype, device=runner.device)
    state.other_kv_index = 0  # slot that masked positions read: block 0 is never allocated and stays zero
    positions = batch.positions[: batch.n_tokens]
    state.position_cos = model._cos_cached.index_select(0, positions)
    state.position_sin = model._sin_cached.index_select(0, positions)
    state.batch_size = batch.n_rows
    state.b_req_idx = torch.arange(batch.n_rows, dtype=torch.int32, device=runner.device)
    state.b_seq_len = batch.context_len
    state.is_prefill = batch.n_decode < batch.n_rows
    if state.is_prefill:
        state.use_dynamic_prompt_cache = True  # chunks attend to tokens of earlier passes
        state.b_start_loc = batch.query_start[:-1]
        state.b_ready_cache_len = batch.context_len - batch.query_start.diff()
        state.max_len_in_batch = batch.max_query
    else:
        state.b_start_loc = batch.context_len.cumsum(0, dtype=torch.int32) - batch.context_len
        state.max_len_in_batch = batch.max_context
        state.total_token_num = sum(batch.context_lens)
    return state


def _slots(batch: StepBatch, block_tokens: int) -> torch.Tensor:
    """Returns the cache slot of each position, i64[R, max_blocks * block_tokens]."""
    offsets = torch.arange(block_tokens, device=batch.block_table.device)
    return (batch.block_table.long()[:, :, None] * block_tokens + offsets).flatten(1)
