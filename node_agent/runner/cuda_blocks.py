"""Blocks of bytes that hold a pass's inputs, or its outputs, so that each crosses the link in one copy.

A block has fields with dtypes and shapes, and tensors for them that share its memory, on the host and on the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from node_agent.device_event import Event
from node_agent.runner.cuda_stream import Stream
from node_agent.types import LoraBatch, StepBatch

ALIGN = 16
"""Alignment of fields in bytes."""
MAX_LOGPROBS = 64
"""Number of a row's likeliest tokens whose log probabilities are copied back: the maximum of a request's `logprobs`."""

Spec = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtype and shape of the fields, in their order."""


@dataclass(frozen=True)
class StepFields:
    """A StepBatch and its LoraBatch: T tokens, R rows, S scored prompt tokens. Unused tokens and rows are padding."""

    token_ids: torch.Tensor
    """i64[T]"""
    positions: torch.Tensor
    """i64[T]: position of each token in its sequence"""
    slots: torch.Tensor
    """i64[T]: KV-cache slot of each token; -1 is padding"""
    fed: torch.Tensor
    """i64[T]: row of the previous step whose chosen token is this one; -1: it is in `token_ids`"""
    logit_rows: torch.Tensor
    """i64[R]: indices of the tokens whose logits are computed"""
    score_rows: torch.Tensor
    """i64[S]: index of the token before each scored prompt token"""
    score_targets: torch.Tensor
    """i64[S]: id of each scored prompt token"""
    top_k: torch.Tensor
    """i64[R]: sampling parameter; this field and the next four are in the order of `logit_rows`"""
    uniform: torch.Tensor
    """f64[R]"""
    top_p: torch.Tensor
    """f64[R]"""
    min_p: torch.Tensor
    """f64[R]"""
    temperature: torch.Tensor
    """f32[R]"""
    query_start: torch.Tensor
    """i32[R + 1]: index of the first token of each row"""
    context_len: torch.Tensor
    """i32[R]: context length of each row; 0 is padding"""
    block_start: torch.Tensor
    """i32[R]: index in `blocks` of the row's first block"""
    seg_start: torch.Tensor
    """i32[R + 1]: index of the first token of each segment"""
    seg_slot: torch.Tensor
    """i32[R]: adapter slot of each segment; -1 is the base model or padding"""
    token_slot: torch.Tensor
    """i32[T]: adapter slot of each token"""
    blocks: torch.Tensor
    """i32[number of blocks]: KV blocks of all rows, row by row. It is the last field, so that its unused end need not
    be copied."""


def step_spec(tokens: int, rows: int, blocks: int, scored: int = 0) -> Spec:
    """Returns the dtype and shape of each field of StepFields."""
    i64, f64, f32, i32 = torch.int64, torch.float64, torch.float32, torch.int32
    return {
        "token_ids": (i64, (tokens,)), "positions": (i64, (tokens,)), "slots": (i64, (tokens,)),
        "fed": (i64, (tokens,)), "logit_rows": (i64, (rows,)), "score_rows": (i64, (scored,)),
        "score_targets": (i64, (scored,)),
        "top_k": (i64, (rows,)), "uniform": (f64, (rows,)), "top_p": (f64, (rows,)), "min_p": (f64, (rows,)),
        "temperature": (f32, (rows,)), "query_start": (i32, (rows + 1,)), "context_len": (i32, (rows,)),
        "block_start": (i32, (rows,)), **lora_spec(tokens, rows), "blocks": (i32, (blocks,)),
    }  # fmt: skip


@dataclass(frozen=True)
class OutFields:
    """Results of sampling for Q rows; k is at most MAX_LOGPROBS."""

    ids: torch.Tensor
    """i64[Q]: chosen tokens"""
    finite: torch.Tensor
    """i32[Q]: 0 if the row's logits were not finite"""
    chosen: torch.Tensor
    """f32[Q]: log probability of the chosen token. This field and the next two are written only if a row requests log
    probabilities."""
    top_ids: torch.Tensor
    """i32[Q, k]: ids of the k most likely tokens"""
    top_values: torch.Tensor
    """f32[Q, k]: log probabilities of the tokens in `top_ids`"""


def out_spec(rows: int, vocab: int) -> Spec:
    """Returns the dtype and shape of each field of OutFields."""
    top = (rows, min(MAX_LOGPROBS, vocab))
    return {
        "ids": (torch.int64, (rows,)),
        "finite": (torch.int32, (rows,)),
        "chosen": (torch.float32, (rows,)),
        "top_ids": (torch.int32, top),
        "top_values": (torch.float32, top),
    }


def size_of(spec: Spec, upto: str | None = None) -> int:
    """Returns the bytes of a block with these fields. With `upto`, counts only the fields before that one."""
    at = 0
    for name, (dtype, shape) in spec.items():
        at = -(-at // ALIGN) * ALIGN
        if name == upto:
            return at
        at += int(np.prod(shape)) * dtype.itemsize
    return max(at, 1)


def views(spec: Spec, block: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the fields of a block u8[size_of(spec)] as tensors that share its memory."""
    fields, at = {}, 0
    for name, (dtype, shape) in spec.items():
        at = -(-at // ALIGN) * ALIGN
        size = int(np.prod(shape)) * dtype.itemsize
        fields[name] = block[at : at + size].view(dtype).view(shape)
        at += size
    return fields


def send(stream: Stream, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Enqueues the copy of host tensors to the device, as one block. Returns the tensors on the device."""
    spec = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    size = size_of(spec)
    host, device = stream.host(size), stream.empty(size)
    for name, field in views(spec, host).items():
        field.copy_(tensors[name])
    stream.upload(device, host, size)
    return views(spec, device)


def download(stream: Stream, spec: Spec, host: torch.Tensor, device: torch.Tensor, everything: bool) -> Event:
    """Enqueues the copy of an OutFields block to the host, and returns the event after it. `everything`: whether to
    copy the fields of log probabilities too."""
    stream.download(host, device, size_of(spec, None if everything else "chosen"))
    return stream.event()


def fill(fields: StepFields, batch: StepBatch, lora: LoraBatch | None, block_tokens: int) -> int:
    """Writes a batch, and padding after it, to a block on the host. Returns the number of KV blocks written to
    `blocks`; the rest of that field need not be copied."""
    for field, values, padding in (
        (fields.token_ids, batch.token_ids, 0),
        (fields.positions, batch.positions, 0),
        (fields.slots, batch.slot_mapping, -1),
        (fields.logit_rows, batch.logit_rows, 0),
        (fields.query_start, batch.query_start, batch.n_tokens),
        (fields.context_len, batch.context_len, 0),
    ):
        _put(field, values, padding)
    _put(fields.fed, torch.tensor(batch.fed or [], dtype=torch.int64), -1)
    if batch.scoring is not None:
        fields.score_rows.copy_(batch.scoring.rows)
        fields.score_targets.copy_(batch.scoring.targets)
    for name in ("top_k", "uniform", "top_p", "min_p", "temperature"):
        field = getattr(fields, name)
        _put(field, torch.tensor(getattr(batch.sampling, name), dtype=field.dtype), 0)
    fill_lora({name: getattr(fields, name) for name in LORA_FIELDS}, lora)
    counts = np.asarray([-(-context // block_tokens) for context in batch.context_lens], dtype=np.int32)
    table = batch.block_table.numpy()
    used = table[np.arange(table.shape[1])[None] < counts[:, None]]
    fields.blocks[: used.size].copy_(torch.from_numpy(used))
    _put(fields.block_start, torch.from_numpy(np.cumsum(counts, dtype=np.int32) - counts), 0)
    return int(used.size)


def expand_blocks(fields: StepFields, width: int) -> torch.Tensor:
    """Returns the block table i32[R, width] of the rows, on the device of the fields. Entries after a row's last block
    are arbitrary."""
    at = fields.block_start[:, None] + torch.arange(width, dtype=torch.int32, device=fields.blocks.device)
    return fields.blocks[at.clamp_(max=fields.blocks.shape[0] - 1)]


LORA_FIELDS = ("seg_start", "seg_slot", "token_slot")


def lora_spec(tokens: int, segments: int) -> Spec:
    """Returns the dtype and shape of the tensors of a LoraBatch."""
    i32 = torch.int32
    return {"seg_start": (i32, (segments + 1,)), "seg_slot": (i32, (segments,)), "token_slot": (i32, (tokens,))}


def fill_lora(fields: Mapping[str, torch.Tensor], lora: LoraBatch | None) -> None:
    """Writes a LoraBatch to its fields on the host, and empty segments after it. None stands for the base model
    alone."""
    for name, padding in zip(LORA_FIELDS, (int(lora.seg_start[-1]) if lora else 0, -1, -1), strict=True):
        values = fields[name][:0] if lora is None else getattr(lora, name)
        _put(fields[name], values, padding)


def lora_batch(fields: StepFields, max_rank: int) -> LoraBatch:
    """Returns the LoraBatch of a block on the device, without leases and bounds."""
    return LoraBatch(fields.seg_start, fields.seg_slot, fields.token_slot, [], [], max_rank, empty=False)


def _put(field: torch.Tensor, values: torch.Tensor, padding: int) -> None:
    count = values.shape[0]
    field[:count].copy_(values)
    if count < field.shape[0]:
        field[count:].fill_(padding)
