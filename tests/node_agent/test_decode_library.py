"""Decode attention by another project's library: a stand-in at the import border, which computes by float64."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from kernels.decoder import Heads, PagedCache
from kernels.gpu_ops import Rows
from kernels.gpu_reference import TorchOperations
from node_agent.engine.setup import find_runner
from node_agent.runner import decode_library
from node_agent.runner.cuda_check import step
from node_agent.runner.cuda_pass import LayeredPass
from node_agent.runner.cuda_runner import CudaRunner
from node_agent.runner.cuda_stream import Stream
from node_agent.runner.decode_library import TOLERANCE, choose_decode_attention
from node_agent.types import RunnerSettings
from tests.kernels.paged import check, make_sequences
from tests.node_agent.test_cuda_runner import SHAPE, save_random

CPU = torch.device("cpu")


def attend(
    q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], contexts: Any, table: Any, scale: float, window: int | None
) -> torch.Tensor:
    """[R, heads, head_dim] of paged keys and values [blocks, block_tokens, kv_heads, head_dim], in float64."""
    out = torch.empty_like(q)
    for row, context in enumerate(contexts.tolist()):
        keys, values = (part[table[row].clamp(max=part.shape[0] - 1).long()].flatten(0, 1)[:context] for part in kv)
        begin, group = max(0, context - window) if window else 0, q.shape[1] // keys.shape[1]
        keys, values = (part[begin:].double().repeat_interleave(group, dim=1) for part in (keys, values))
        weights = (torch.einsum("hd,phd->hp", q[row].double(), keys) * scale).softmax(dim=-1)
        out[row] = torch.einsum("hp,phd->hd", weights, values).to(q.dtype)
    return out


class FlashInfer:
    """`flashinfer.decode`, as far as it is called."""

    name = "flashinfer.decode"

    def __init__(self, seconds: float = 0.0, off: float = 0.0) -> None:
        self.calls, self.seconds, self.off = 0, seconds, off

    def trtllm_batch_decode_with_kv_cache(
        self, query: torch.Tensor, kv_cache: Any, workspace_buffer: torch.Tensor, block_tables: torch.Tensor,
        seq_lens: torch.Tensor, max_seq_len: int, bmm1_scale: float = 1.0, bmm2_scale: float = 1.0,
        window_left: int = -1, out: torch.Tensor | None = None, kv_layout: str = "HND",
    ) -> torch.Tensor:  # fmt: skip
        assert kv_layout == "NHD" and bmm2_scale == 1.0 and out is not None
        assert query.is_contiguous() and out.is_contiguous() and workspace_buffer.dtype is torch.uint8
        assert block_tables.dtype is seq_lens.dtype is torch.int32 and int(seq_lens.min()) >= 1
        assert int(seq_lens.max()) <= max_seq_len
        window = window_left + 1 if window_left >= 0 else None
        out.copy_(attend(query, kv_cache, seq_lens, block_tables, bmm1_scale, window) + self.off)
        self.calls += 1
        time.sleep(self.seconds)
        return out


class FlashAttention:
    """`flash_attn_interface`, as far as it is called."""

    name = "flash_attn_interface"

    def __init__(self, seconds: float = 0.0, off: float = 0.0) -> None:
        self.calls, self.seconds, self.off = 0, seconds, off

    def flash_attn_with_kvcache(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *, cache_seqlens: torch.Tensor,
        page_table: torch.Tensor, softmax_scale: float, causal: bool, window_size: tuple[int, int], num_splits: int,
    ) -> torch.Tensor:  # fmt: skip
        assert causal and num_splits >= 1 and q.shape[1] == 1 and q.stride(-1) == 1
        assert page_table.dtype is cache_seqlens.dtype is torch.int32
        window = None if window_size == (-1, -1) else window_size[0] + 1
        found = attend(q[:, 0], (k_cache, v_cache), cache_seqlens, page_table, softmax_scale, window)
        self.calls += 1
        time.sleep(self.seconds)
        return (found + self.off)[:, None]


class SlowOperations(TorchOperations):
    """Slower than a stand-in."""

    def decode_attention(self, *given: Any, **named: Any) -> None:
        super().decode_attention(*given, **named)
        time.sleep(0.1)


Install = Callable[[Any], Any]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs a stand-in, on what passes for a Hopper GPU."""
    monkeypatch.setattr(decode_library, "capability", lambda _: 9)
    monkeypatch.setattr(decode_library, "TRIAL_ROUNDS", 1)
    monkeypatch.setattr(decode_library, "TRIAL_CONTEXTS", (1, 16, 17, 40, 0))
    for library in decode_library.LIBRARIES:  # what is really installed needs a GPU
        monkeypatch.setitem(sys.modules, library.module, None)

    def stand_in(made: Any) -> Any:
        module: Any = ModuleType(made.name)
        for name in dir(made):
            if not name.startswith("_"):
                setattr(module, name, getattr(made, name))
        parent = made.name.partition(".")[0]
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        monkeypatch.setitem(sys.modules, made.name, module)
        return made

    return stand_in


def layers(dtype: torch.dtype = torch.bfloat16, head_dim: int = 64, block: int = 16) -> list[PagedCache]:
    """One layer without a window and one with."""
    keys, values = torch.zeros(2, 4 * block, 1, head_dim, dtype=dtype).unbind()
    return [PagedCache(Heads(8, 1, head_dim, head_dim**-0.5, window), keys, values, block) for window in (None, 9)]


@pytest.mark.parametrize("kind", [FlashInfer, FlashAttention])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_faster_library_computes_what_our_kernel_does(install: Install, kind: Any, dtype: torch.dtype) -> None:
    """Contexts of one token, up to a block's edge and behind it, several blocks; rows of a bucket that are padding."""
    library = install(kind())
    chosen = choose_decode_attention(SlowOperations(), layers(dtype), Stream())
    assert chosen is not None
    library.calls = 0
    for window in (None, 1, 20):
        drawn = make_sequences([1, 16, 17, 90], [1] * 4, Heads(16, 2, 64, 0.2, window), dtype)
        out, scratch = drawn.out, torch.empty(2, 4, 16, 66)
        rows = Rows(drawn.rows.context_len, drawn.rows.block_table)
        chosen(drawn.q, drawn.cache, rows, out=out, scratch=scratch)
        check(out, drawn)
        padded = Rows(torch.tensor([1, 16, 0, 90], dtype=torch.int32), rows.block_table)
        again = drawn.out
        chosen(drawn.q, drawn.cache, padded, out=again, scratch=scratch)
        assert torch.equal(again[[0, 1, 3]], out[[0, 1, 3]])
    assert library.calls == 6


@pytest.mark.parametrize("kind", [FlashInfer, FlashAttention])
def test_a_library_that_is_slower_or_wrong_is_not_used(
    install: Install, kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    slow = install(kind(seconds=0.1))
    assert choose_decode_attention(TorchOperations(), layers(), Stream()) is None and slow.calls
    install(kind(off=3 * TOLERANCE[torch.bfloat16] * 5))
    assert choose_decode_attention(SlowOperations(), layers(), Stream()) is None
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert warning.library == kind.name and "off" in warning.reason


def test_what_a_library_does_not_take_it_is_not_asked(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    library = install(FlashInfer())
    for others in (layers(torch.float32), layers(head_dim=80), layers(block=8)):
        assert choose_decode_attention(SlowOperations(), others, Stream()) is None
    monkeypatch.setattr(decode_library, "capability", lambda _: 8)
    assert choose_decode_attention(SlowOperations(), layers(), Stream()) is None
    assert not library.calls


def test_a_library_that_reads_behind_a_context_is_not_used(install: Install, caplog: pytest.LogCaptureFixture) -> None:
    """It would hand one request's NaN to the next one that has the block."""

    class Careless(FlashAttention):
        def flash_attn_with_kvcache(self, q: Any, k_cache: Any, v_cache: Any, **named: Any) -> torch.Tensor:
            found = super().flash_attn_with_kvcache(q, k_cache, v_cache, **named)
            for row, context in enumerate(named["cache_seqlens"].tolist()):
                block = named["page_table"][row, (context - 1) // v_cache.shape[1]]
                found[row] += 0 * v_cache[block].sum()
            return found

    install(Careless())
    assert choose_decode_attention(SlowOperations(), layers(), Stream()) is None
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "nan" in warning.reason


def test_a_library_that_breaks_is_named(install: Install, caplog: pytest.LogCaptureFixture) -> None:
    class Breaks(FlashInfer):
        def trtllm_batch_decode_with_kv_cache(self, **_: Any) -> torch.Tensor:
            raise RuntimeError("nvcc was not found")

    install(Breaks())
    assert choose_decode_attention(SlowOperations(), layers(), Stream()) is None
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert warning.reason == "RuntimeError('nvcc was not found')"


def test_without_a_gpu_or_a_library_ours_computes(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_decode_attention(TorchOperations(), layers(), Stream()) is None
    monkeypatch.undo()
    assert decode_library.capability(CPU) == 0


def test_the_runner_uses_it_for_every_decode_step(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start's own check compares its logits with the model's."""
    library = install(FlashAttention())
    monkeypatch.setattr("node_agent.runner.cuda_layers.layer_operations", lambda _: SlowOperations())
    path = save_random(LlamaConfig(**{**SHAPE, "num_hidden_layers": 2}, head_dim=16), tmp_path / "llama")
    opened = find_runner("cuda")(RunnerSettings(path, CPU, torch.bfloat16, block_tokens=4, num_blocks=lambda _: 16))
    assert isinstance(opened, CudaRunner) and opened.decoder.decode_attention is not None
    trial, run = library.calls, LayeredPass(opened, step(3, 4, 4, CPU), None)
    run.advance(opened.num_layers)
    assert library.calls == trial + 2, "a call per layer"
