"""What a node takes at most on devices of faked sizes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from garnish.service_file import Node
from node_agent.config import EngineConfig
from node_agent.engine import setup
from node_agent.engine.setup import BY_DEVICE, kv_blocks, with_sizes
from node_agent.runner.lora_choice import kernel_of

GIB = 1 << 30
CUDA, CPU = torch.device("cuda"), torch.device("cpu")
LLAMA_7B: Any = SimpleNamespace(kv_elements=2 * 32 * 4096)


def config(**settings: Any) -> EngineConfig:
    return EngineConfig(model_dir="", base_id="", registry="", **settings)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets a GPU's free and whole memory."""

    def set_memory(free: int, total: int) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, total))

    return set_memory


def test_a_gpu_takes_256_rows_and_gives_adapters_a_tenth(gpu: Any) -> None:
    gpu(79 * GIB, 80 * GIB)
    sized = with_sizes(config(), CUDA)
    assert (sized.max_rows, sized.chunk_tokens, sized.max_cold) == (256, 2048, 4)
    assert sized.adapter_memory == 8 * GIB
    gpu((80 - 13) * GIB, 80 * GIB)  # the weights are there
    per_block = LLAMA_7B.kv_elements * 2 * sized.block_tokens
    assert kv_blocks(sized, LLAMA_7B, CUDA, torch.float16) == (67 - 8 - 8) * GIB // per_block


def test_a_cpu_takes_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "free_memory", lambda _: 2 * GIB + (256 << 20))
    sized = with_sizes(config(), CPU)
    assert (sized.max_rows, sized.chunk_tokens, sized.max_cold, sized.adapter_memory) == (32, 512, 2, 256 << 20)
    small: Any = SimpleNamespace(kv_elements=1 << 10)
    assert kv_blocks(sized, small, CPU, torch.float32) == (GIB // 2) // (1 << 10) // 4 // sized.block_tokens
    monkeypatch.setattr(setup, "free_memory", lambda _: 64 * GIB)
    assert kv_blocks(sized, small, CPU, torch.float32) == GIB // (1 << 10) // 4 // sized.block_tokens


def test_what_torch_keeps_of_freed_memory_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver counts it as taken: the parts of fused projections, by reading nine gigabytes of a 7B model."""
    kept = [5 * GIB]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10 * GIB - kept[0], 24 * GIB))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: kept.__setitem__(0, 0))
    assert kv_blocks(config(adapter_memory=2 * GIB), LLAMA_7B, CUDA, torch.float16) == (8 * GIB - 24 * GIB // 10) // (
        LLAMA_7B.kv_elements * 2 * 16
    )


@given(
    total=st.integers(8 * GIB, 200 * GIB), weights=st.floats(0, 0.79), stated=st.integers(1, 7 * GIB),
    rows=st.integers(1, 1024),
)  # fmt: skip
def test_what_is_stated_wins_and_nothing_is_given_twice(total: int, weights: float, stated: int, rows: int) -> None:
    free = int(total * (1 - weights))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "mem_get_info", lambda _: (free, total))
        by_device, said = with_sizes(config(), CUDA), with_sizes(config(adapter_memory=stated, max_rows=rows), CUDA)
        assert (said.adapter_memory, said.max_rows) == (stated, rows)
        assert with_sizes(said, CUDA) == said
        kv = kv_blocks(by_device, LLAMA_7B, CUDA, torch.float16) * LLAMA_7B.kv_elements * 2 * by_device.block_tokens
        assert kv + by_device.adapter_memory + total // 10 <= free
        assert kv_blocks(config(kv_memory=GIB), LLAMA_7B, CUDA, torch.float16) == 128


def test_a_gpu_without_room_says_who_has_it(gpu: Any) -> None:
    gpu(3 * GIB, 24 * GIB)
    with pytest.raises(ValueError, match=r"^kv_memory: 0 bytes \(of 3221225472 free on the GPU, less .* for passes\)"):
        kv_blocks(with_sizes(config(), CUDA), LLAMA_7B, CUDA, torch.float16)


def test_the_files_bounds_admit_what_devices_take() -> None:
    """Or a file could not state what it gets unstated."""
    for bounds in BY_DEVICE.values():
        assert msgspec.convert(bounds, Node).max_rows == bounds["max_rows"]


def test_kernels_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [kernel_of("auto", CUDA), kernel_of("bgmv", CUDA), kernel_of("auto", CPU)] == ["mbgmv", "bgmv", "cpu"]
    with pytest.raises(ValueError, match="lora_kernel: 'sgmv' is unknown; use auto, mbgmv, bgmv"):
        kernel_of("sgmv", CUDA)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert kernel_of("bgmv", CPU) == "bgmv"
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match="lora_kernel: bgmv runs on a GPU, and this node computes on cpu; use auto"):
        kernel_of("bgmv", CPU)
