"""Decode attention by a library that is installed (FlashInfer, FlashAttention 3), where it is faster than our kernel.

Nothing depends on one. At each start each library that takes the model's heads computes some rows, captured: it is used
if they are what our kernel makes of them, and come faster. Neither library has been run with this. Of FlashInfer that
is a function of one call: its BatchDecodeWithPagedKVCacheWrapper plans each step on the host, by copies of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from statistics import median
from typing import Any

import torch

from kernels.decoder import Heads, PagedCache
from kernels.gpu_calls import check_decode
from kernels.gpu_ops import LayerOperations, Rows, decode_scratch
from node_agent.device import device_seconds
from node_agent.runner.cuda_stream import Stream

log = logging.getLogger(__name__)

DecodeAttention = Callable[..., None]
"""`LayerOperations.decode_attention`"""
WORKSPACE_BYTES = 128 << 20  # what FlashInfer asks for
TRIAL_CONTEXTS = (1, 16, 17, 130, 700, 1024, 0, 0) * 4
"""Positions of each row of a trial; 0 is padding."""
TRIAL_ROUNDS = 9
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""Of the largest value; libraries take no other dtypes."""


@dataclass(frozen=True)
class Call:
    """q and out [R, heads, head_dim], kv [blocks, block_tokens, kv_heads, head_dim], contexts of at least one token."""

    q: torch.Tensor
    kv: tuple[torch.Tensor, torch.Tensor]
    context_len: torch.Tensor
    block_table: torch.Tensor
    heads: Heads
    out: torch.Tensor
    splits: int
    workspace: torch.Tensor


@dataclass(frozen=True)
class Library:
    """What a library takes, and how it is called."""

    module: str
    gpus: Collection[int]
    """major compute capabilities"""
    head_dims: Collection[int]
    block_tokens: Collection[int]
    attend: Callable[[Any, Call], None]


def _flashinfer(module: Any, call: Call) -> None:
    window, longest = call.heads.window or 0, call.block_table.shape[1] * call.kv[0].shape[1]
    module.trtllm_batch_decode_with_kv_cache(
        query=call.q.contiguous(), kv_cache=call.kv, workspace_buffer=call.workspace, block_tables=call.block_table,
        seq_lens=call.context_len, max_seq_len=longest, bmm1_scale=call.heads.scaling, bmm2_scale=1.0,
        window_left=window - 1, out=call.out, kv_layout="NHD",
    )  # fmt: skip


def _flash_attention(module: Any, call: Call) -> None:
    window = (-1, -1) if call.heads.window is None else (call.heads.window - 1, 0)
    found = module.flash_attn_with_kvcache(
        call.q[:, None], *call.kv, cache_seqlens=call.context_len, page_table=call.block_table,
        softmax_scale=call.heads.scaling, causal=True, window_size=window, num_splits=call.splits,
    )  # fmt: skip
    call.out.copy_(found[:, 0])


LIBRARIES = (
    Library("flash_attn_interface", (9,), range(8, 257, 8), range(1, 1025), _flash_attention),
    Library("flashinfer.decode", (9, 10, 12), (64, 128, 256), (16, 32, 64), _flashinfer),
)


def capability(device: torch.device) -> int:
    """Returns the GPU's major compute capability; 0 on a CPU."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


def choose_decode_attention(
    operations: LayerOperations, caches: Sequence[PagedCache], stream: Stream
) -> DecodeAttention | None:
    """Returns the fastest library's for layers with these caches, whose heads differ in their windows alone; None: ours
    is faster."""
    best: DecodeAttention | None = None
    cache, least = caches[0], 0.0
    kinds = list({each.heads.window: each for each in caches}.values())
    for library in LIBRARIES:
        takes = cache.heads.head_dim in library.head_dims and cache.block_tokens in library.block_tokens
        if not takes or cache.keys.dtype not in TOLERANCE or capability(cache.keys.device) not in library.gpus:
            continue
        try:
            attend = partial(library.attend, import_module(library.module))
            other = partial(_attend, attend, torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=cache.keys.device))
            pairs = [[_try(one, kind, stream) for one in (operations.decode_attention, other)] for kind in kinds]
            apart = [float((found - ours).abs().max() / ours.abs().max()) for (ours, _), (found, _) in pairs]
            if not all(each <= TOLERANCE[cache.keys.dtype] for each in apart):
                raise ValueError(f"its results are {apart} off")
        except Exception as error:  # whatever another project's code raises
            level = logging.INFO if isinstance(error, ModuleNotFoundError) else logging.WARNING
            log.log(level, "decode attention is ours", extra={"library": library.module, "reason": repr(error)})
            continue
        ours, seconds = (sum(pair[i][1] for pair in pairs) for i in range(2))
        log.info("decode attention was timed", extra={"library": library.module, "seconds": seconds, "ours": ours})
        if seconds < (least or ours):
            best, least = other, seconds
    return best


def _attend(
    attend: Callable[[Call], None], workspace: torch.Tensor, q: torch.Tensor, cache: PagedCache, rows: Rows,
    *, out: torch.Tensor, scratch: torch.Tensor,
) -> None:  # fmt: skip
    """A DecodeAttention. Padding rows are computed as one token of whatever block their table begins with."""
    check_decode(q, cache, rows, out, scratch)
    heads = cache.heads
    shape, paged = (-1, heads.heads, heads.head_dim), (-1, cache.block_tokens, heads.kv_heads, heads.head_dim)
    q, kv = q[:, : out.shape[1]].view(shape), (cache.keys.view(paged), cache.values.view(paged))
    splits, seen = scratch.shape[0], rows.context_len.clamp(min=1)  # splits by ourselves: neighbours change no bit
    attend(Call(q, kv, seen, rows.block_table, heads, out.view(shape), splits, workspace))


@torch.inference_mode()
def _try(attention: DecodeAttention, like: PagedCache, stream: Stream) -> tuple[torch.Tensor, float]:
    """Returns f32[rows, heads * head_dim] of drawn rows over their own cache, and the seconds of a captured call."""
    device, dtype, block, count = like.keys.device, like.keys.dtype, like.block_tokens, len(TRIAL_CONTEXTS)
    heads = like.heads
    width, made = -(-max(TRIAL_CONTEXTS) // block), torch.Generator(device).manual_seed(0)
    table = torch.arange(count * width, dtype=torch.int32, device=device).view(count, width)
    rows = Rows(torch.tensor(TRIAL_CONTEXTS, dtype=torch.int32, device=device), table)
    q = torch.randn(count, heads.heads * heads.head_dim, generator=made, dtype=dtype, device=device)
    shape = (2, count, width * block, heads.kv_heads, heads.head_dim)
    kv = torch.randn(shape, generator=made, dtype=dtype, device=device)
    behind = torch.arange(shape[2], device=device) >= rows.context_len[:, None]  # others' numbers, which may be NaN
    keys, values = kv.masked_fill_(behind[:, :, None, None], torch.nan).flatten(1, 2)
    out, scratch = torch.zeros_like(q), decode_scratch(count, heads, width * block, device)
    cache = PagedCache(heads, keys, values, block)
    run = stream.capture(lambda: attention(q, cache, rows, out=out, scratch=scratch))
    seconds = median(device_seconds(device, run) for _ in range(TRIAL_ROUNDS))
    return out[rows.context_len > 0].float(), seconds
