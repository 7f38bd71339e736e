"""What a node needs on a GPU, against the models' published sizes and what a real model's files hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from adapters.base_sizes import sizes_from_config
from infra.errors import InfraError
from infra.instances import GIB, INSTANCE_TYPES, RUNTIME, check_fits, gpus_of, need_of

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


def test_the_files_of_a_real_model(stories_dir: Path) -> None:
    config = json.loads((stories_dir / "config.json").read_text())
    held = 0
    for file in stories_dir.glob("*.safetensors"):
        with safe_open(file, framework="np") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (not a dict)
                size = 1
                for extent in tensors.get_slice(name).get_shape():
                    size *= extent
                held += size
    sizes = sizes_from_config(config)
    assert sizes.linear + sizes.rest == held


def test_what_is_stated_counts() -> None:
    need = need_of(LLAMA_8B, dtype="auto", adapter_memory=4 << 30, kv_memory=2 << 30)
    assert (need.weights, need.adapters, need.kv, need.runtime) == (16_060_522_496, 4 << 30, 2 << 30, RUNTIME)
    assert need_of(LLAMA_8B, dtype="float32", adapter_memory=0, kv_memory=0).weights == 2 * need.weights
    least = need_of(LLAMA_8B, dtype="auto", adapter_memory=0, kv_memory=None)
    assert least.kv == 8192 * 131_072


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"head_dim": [64]}, "head_dim"),
    ],
)
def test_a_model_that_does_not_tell_is_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InfraError, match=rf"base_model: .*config\.json.* for {field}$"):
        need_of({**LLAMA_8B, **changes}, dtype="auto", adapter_memory=0, kv_memory=None)


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(InfraError, match="'fp8' is none of float32"):
        need_of({**LLAMA_8B, "torch_dtype": "fp8"}, dtype="auto", adapter_memory=0, kv_memory=None)


def test_it_fits_or_is_refused_with_the_numbers() -> None:
    need = need_of(LLAMA_8B, dtype="bfloat16", adapter_memory=4 << 30, kv_memory=None)
    check_fits("node_pools.l40s", "g6e.2xlarge", INSTANCE_TYPES["g6e.2xlarge"], need)
    with pytest.raises(InfraError) as refused:
        check_fits("node_pools.t4", "g4dn.xlarge", INSTANCE_TYPES["g4dn.xlarge"], need)
    told = str(refused.value)
    assert "node_pools.t4: a node does not fit on the T4 of g4dn.xlarge: it needs 21.0 GiB" in told
    assert "(15.0 base model, 4.0 adapter_memory, 1.0 keys and values, 1.0 runtime), and a GPU has 15.0 GiB" in told


def test_the_bound_itself() -> None:
    need = need_of(LLAMA_8B, dtype="bfloat16", adapter_memory=0, kv_memory=0)
    gpus = INSTANCE_TYPES["g5.xlarge"]
    spare = gpus.memory - need.total
    check_fits("x", "g5.xlarge", gpus, need_of(LLAMA_8B, dtype="bfloat16", adapter_memory=spare, kv_memory=0))
    with pytest.raises(InfraError, match="does not fit"):
        check_fits("x", "g5.xlarge", gpus, need_of(LLAMA_8B, dtype="bfloat16", adapter_memory=spare + 1, kv_memory=0))


def test_an_unknown_instance_type() -> None:
    with pytest.raises(InfraError, match=r"node_pools\.a: unknown .*'g6e\.2xlrge'; did you mean g6e\.2xlarge"):
        gpus_of("g6e.2xlrge", "node_pools.a")
    with pytest.raises(InfraError, match=r"known families: g4dn, g5"):
        gpus_of("m5.large", "node_pools.a")


def test_the_table_is_plausible() -> None:
    assert all(1 <= gpus.count <= 8 and 14 * GIB < gpus.memory < 142 * GIB for gpus in INSTANCE_TYPES.values())
