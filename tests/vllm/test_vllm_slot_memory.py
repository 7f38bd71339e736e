"""The memory that the real vLLM reserves for weights and slots, against the plan made before its start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from adapters.base_sizes import sizes_from_config
from node_agent.vllm.memory import CPU_KV_BYTES, CPU_SLOTS
from tests.vllm.vllm_process import VllmProcess

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]


@pytest.mark.slow
def test_the_demo_base_takes_what_was_planned(python: Path, smollm_dir: Path, tmp_path: Path) -> None:
    """In fp32, with as many slots as are chosen on a CPU: only the projections have slots, not the vocabulary."""
    arguments = {"max_loras": "auto", "max_lora_rank": 64}
    with VllmProcess(python, smollm_dir, tmp_path / "registry", tmp_path, **arguments) as vllm:
        assert vllm.ready is not None
        memory, limit = vllm.ready.device_memory, vllm.ready.rank_limit
        assert vllm.ready.adapter_bytes == CPU_SLOTS * memory.slot if memory is not None else False
    sizes = sizes_from_config(json.loads((smollm_dir / "config.json").read_bytes()))
    assert memory is not None and limit == 64
    assert (memory.slots, memory.kv) == (CPU_SLOTS, CPU_KV_BYTES)
    assert memory.slot == 64 * 4 * sizes.per_rank() == 64 * 4 * 30 * (1152 + 768 + 768 + 1152 + 3 * 2112)
    assert memory.weights == sizes.weights(4) == 4 * 134_515_008


def test_slots_that_do_not_fit_are_refused_before_the_base_model_is_loaded(
    python: Path, smollm_dir: Path, tmp_path: Path
) -> None:
    arguments = {"max_loras": 100_000, "max_lora_rank": 512}
    with (
        pytest.raises(
            RuntimeError, match=r"do not fit on this host: 0\.50 weights \+ .* adapter slots \(100000 x 0\.58"
        ),
        VllmProcess(python, smollm_dir, tmp_path / "registry", tmp_path, **arguments),
    ):
        pass
