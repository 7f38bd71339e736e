"""The plan of a node's device memory, for the shapes of real models on real GPUs."""

from __future__ import annotations

from typing import Any

import pytest

from adapters.base_sizes import sizes_from_config
from cluster.device_memory import DeviceMemory, NoRoom
from node_agent.config import VllmConfig
from node_agent.vllm.memory import CPU_KV_BYTES, CPU_SLOTS, RUNTIME, plan_node
from node_agent.vllm.start import with_measured
from tests.adapters.test_base_sizes import LLAMA_8B, QWEN3_32B

A10G, H100 = 23_028 << 20, 81_559 << 20
LLAMA_WEIGHTS, QWEN_WEIGHTS = 2 * 8_030_261_248, 2 * 32_762_123_264
LLAMA_SLOT, QWEN_SLOT = 335_544_320, 1_073_741_824
"""Bytes of a slot of rank 64 in bfloat16."""


def plan(config: dict[str, Any], device: int, settings: dict[str, Any] | None = None, **stated: Any) -> DeviceMemory:
    return plan_node(sizes_from_config(config), config, VllmConfig(arguments=stated), device=device, **(settings or {}))


def test_as_many_slots_as_half_of_the_rest_holds() -> None:
    """At a share of one half for keys and values, and at most one for each row."""
    small = plan(LLAMA_8B, A10G, max_model_len=8192)
    rest = int(A10G * 0.9) - LLAMA_WEIGHTS - RUNTIME
    assert (small.weights, small.slot, small.slots) == (LLAMA_WEIGHTS, LLAMA_SLOT, rest // 2 // LLAMA_SLOT)
    assert small.slots == 6
    assert plan(LLAMA_8B, H100).slots == 32, "as many as rows"
    assert plan(LLAMA_8B, H100, {"max_rows": 8}).slots == 8
    assert plan(LLAMA_8B, H100, max_num_seqs=64).slots == 64
    large = plan(QWEN3_32B, H100, max_model_len=16_384)
    assert (large.weights, large.slot) == (QWEN_WEIGHTS, QWEN_SLOT)
    assert large.slots == (int(H100 * 0.9) - QWEN_WEIGHTS - RUNTIME) // 2 // QWEN_SLOT == 4


def test_the_share_of_keys_and_values_and_their_size_are_stated() -> None:
    arguments = {"max_model_len": 8192}
    sizes = sizes_from_config(LLAMA_8B)
    most = plan_node(sizes, LLAMA_8B, VllmConfig(arguments=arguments, kv_share=0.0), device=A10G)
    least = plan_node(sizes, LLAMA_8B, VllmConfig(arguments=arguments, kv_share=0.9), device=A10G)
    assert (most.slots, least.slots) == (10, 1)
    assert most.kv >= 8192 * 131_072
    stated = plan(LLAMA_8B, A10G, {"kv_memory": 2 << 30}, **arguments)
    assert (stated.kv, stated.device, stated.slots) == (2 << 30, A10G, 14)


@pytest.mark.parametrize(
    ("settings", "stated", "names"),
    [
        ({}, {"max_loras": 32, "max_model_len": 8192}, "10.0 adapter slots (32 x 0.31)"),
        ({}, {}, "16.0 keys and values"),
        ({"kv_memory": 8 << 30}, {}, "8.0 keys and values"),
        ({"dtype": "float32"}, {"max_model_len": 8192}, "29.9 weights"),
        ({}, {"max_lora_rank": 512, "max_loras": 2, "max_model_len": 8192}, "5.0 adapter slots (2 x 2.5)"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_sum(settings: Any, stated: Any, names: str) -> None:
    with pytest.raises(NoRoom) as refused:
        plan(LLAMA_8B, A10G, settings, **stated)
    text = str(refused.value)
    assert names in text and "the base model and its adapters do not fit on a GPU: " in text
    assert f"max_loras ({stated.get('max_loras', 'auto')})" in text
    total = 22.5 if "kv_memory" in settings else 20.2
    assert f"GiB of {total} GiB; state less of" in text, text


def test_quantised_weights_small_caches_and_several_devices_leave_more() -> None:
    with pytest.raises(NoRoom):
        plan(QWEN3_32B, A10G, max_model_len=8192)
    assert plan(QWEN3_32B, H100, max_model_len=8192, quantization="fp8").weights < 0.53 * QWEN_WEIGHTS
    half = plan(QWEN3_32B, H100, tensor_parallel_size=2)
    assert half.weights == QWEN_WEIGHTS // 2 and QWEN_SLOT // 2 < half.slot < 3 * QWEN_SLOT // 4
    assert plan(QWEN3_32B, H100, tensor_parallel_size=2, fully_sharded_loras=True).slot == QWEN_SLOT // 2
    small = plan(LLAMA_8B, A10G, max_loras=1, kv_cache_dtype="fp8", max_model_len=32_768)
    with pytest.raises(NoRoom, match=r"4\.0 keys and values"):
        plan(LLAMA_8B, A10G, max_loras=6, max_model_len=32_768)
    assert small.kv >= 32_768 * 65_536


def test_where_vllm_chooses_the_context_a_short_one_is_enough() -> None:
    assert plan(LLAMA_8B, A10G, max_model_len=-1).slots == plan(LLAMA_8B, A10G, max_model_len=8192).slots


def test_a_cpu_has_few_slots() -> None:
    found = plan(LLAMA_8B, 64 << 30, {"on_cpu": True, "dtype": "float32"})
    assert (found.slots, found.kv, found.device) == (CPU_SLOTS, CPU_KV_BYTES, 64 << 30)
    assert plan({**LLAMA_8B, "torch_dtype": "float32"}, 64 << 30, {"on_cpu": True}).weights == LLAMA_WEIGHTS
    with pytest.raises(NoRoom, match="do not fit on this host"):
        plan(LLAMA_8B, 16 << 30, {"on_cpu": True})


def test_measured_sizes_replace_planned_ones() -> None:
    found = plan(LLAMA_8B, H100)
    measured = with_measured(found, [{"weights": 3, "slots": 64}, {"weights": 2, "slots": 96}])
    assert (measured.weights, measured.slot, measured.slots, measured.kv) == (3, 3, 32, found.kv)
    packed = with_measured(found, [{"weights": 0, "slots": 64}])
    assert (packed.weights, packed.slot) == (LLAMA_WEIGHTS, 2)
