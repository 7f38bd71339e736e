"""vLLM's arguments and sampling parameters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cluster.messages import GenerateRequest, Sampling
from node_agent.config import EngineConfig, VllmConfig
from node_agent.engine.intake import request_of
from node_agent.vllm import worker_extension
from node_agent.vllm.arguments import REFUSED, check_arguments, check_version, engine_arguments, host_gpus
from node_agent.vllm.sampling import seed_of, top_of, vllm_parameters

CONFIG = EngineConfig(model_dir="/models/base", base_id="base", registry="/r", engine="vllm")


def arguments(**stated: Any) -> dict[str, Any]:
    return engine_arguments(replace(CONFIG, vllm=VllmConfig(arguments=stated)), 7)


def test_the_node_sets_what_its_promises_need() -> None:
    found = arguments(quantization="fp8", max_loras="auto", max_lora_rank=128)
    assert found["model"] == "/models/base" and found["served_model_name"] == "base"
    assert found["quantization"] == "fp8" and found["max_lora_rank"] == 128
    assert found["max_loras"] == found["max_cpu_loras"] == 7, "vLLM must never evict by itself"
    assert found["enable_lora"] and found["enable_prefix_caching"]
    assert found["worker_extension_cls"] == worker_extension.NAME
    assert "dtype" not in found and "lora_target_modules" not in found
    assert engine_arguments(CONFIG, 1, ["q_proj"])["lora_target_modules"] == ["q_proj"]


def test_settings_of_the_node_come_before_vllms_defaults() -> None:
    found = engine_arguments(replace(CONFIG, max_rows=3, dtype="float32", prefix_cache="off", kv_memory=1 << 28), 1)
    assert found["kv_cache_memory_bytes"] == 1 << 28
    assert (found["max_num_seqs"], found["dtype"], found["enable_prefix_caching"]) == (3, "float32", False)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_arguments_that_would_break_a_promise_are_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ValueError, match=rf"node\.vllm\.{name}: not taken, since .{{10}}"):
        arguments(**{name: "x"})


def test_a_rank_that_vllm_does_not_take_is_refused() -> None:
    assert "max_lora_rank: 24 is none of 1, 8, 16" in check_arguments({"max_lora_rank": 24})
    assert not check_arguments({"max_lora_rank": 32, "anything": 1})


@pytest.mark.parametrize(
    ("name", "value", "also"),
    [
        ("max_loras", 0, ", or auto"),
        ("max_loras", "many", ", or auto"),
        ("max_num_seqs", True, ""),
        ("max_num_seqs", "auto", ""),
        ("tensor_parallel_size", 1.5, ""),
    ],
)
def test_counts_are_whole_numbers(name: str, value: object, also: str) -> None:
    assert check_arguments({name: value}) == f"{name}: {value!r} is no whole number above 0{also}"


def test_the_number_of_slots_may_be_left_to_the_node() -> None:
    assert not check_arguments({"max_loras": "auto"})


@pytest.mark.parametrize("value", [0, 1.1, "0.9", True])
def test_the_share_of_the_device_is_a_number(value: object) -> None:
    assert check_arguments({"gpu_memory_utilization": value}) == (
        f"gpu_memory_utilization: {value!r} is no number above 0, at most 1"
    )


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.33.1.dev2"])
def test_supported_versions_of_vllm(version: str) -> None:
    check_version(version, any_version=False)


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.32.0", "0.320.0", "dev"])
def test_other_versions_are_refused_unless_the_operator_takes_them(version: str) -> None:
    with pytest.raises(ValueError, match=f"vLLM {version} is not supported: 0.32 and 0.33 are"):
        check_version(version, any_version=False)
    check_version(version, any_version=True)


def parameters(sampling: Sampling, generated: int = 0, **fields: Any) -> dict[str, Any]:
    request = GenerateRequest("r", "", "t", [5, 6, 7], 20, sampling, 60.0, generated=list(range(generated)), **fields)
    return vllm_parameters(request_of(request), {2, 1})


def test_each_parameter_keeps_its_meaning() -> None:
    sampling = Sampling(
        temperature=0.7, top_p=0.9, top_k=4, min_p=0.1, seed=3, presence_penalty=0.5, frequency_penalty=0.25,
        repetition_penalty=1.5, logit_bias={7: 1.0}, logprobs=3, prompt_logprobs=2, min_tokens=6, stop_token_ids=[9],
        allowed_token_ids=[9, 11],
    )  # fmt: skip
    found = parameters(sampling)
    same = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    same += ("logit_bias", "logprobs", "prompt_logprobs", "min_tokens", "allowed_token_ids")
    assert all(found[name] == getattr(sampling, name) for name in same)
    assert found["stop_token_ids"] == [1, 2, 9] and not found["ignore_eos"] and not found["detokenize"]
    assert parameters(sampling, ignore_eos=True)["stop_token_ids"] == [9]


@given(st.integers(0, 20), st.integers(0, 20))
def test_a_resumed_request_goes_on_where_it_was(generated: int, least: int) -> None:
    found = parameters(Sampling(min_tokens=least, prompt_logprobs=1), generated)
    assert found["max_tokens"] == 20 - generated
    assert found["min_tokens"] == max(0, least - generated)
    assert found["prompt_logprobs"] == (None if generated else 1), "the prompt was scored before"


@given(st.integers(-(2**63), 2**64), st.integers(0, 9), st.integers(0, 9999))
def test_seeds_depend_on_their_arguments_alone(seed: int, choice: int, position: int) -> None:
    found = seed_of(seed, choice, position)
    assert 0 <= found < 2**63 and found == seed_of(seed, choice, position)
    assert found not in (seed_of(seed + 1, choice, position), seed_of(seed, choice + 1, position))
    assert found != seed_of(seed, choice, position + 1)


def test_log_probabilities_are_the_likeliest_in_order() -> None:
    entries = {n: SimpleNamespace(logprob=-rank, rank=rank) for n, rank in ((40, 2), (10, 1), (30, 3), (90, 77))}
    found = top_of(90, entries, 2)
    assert (found.logprob, found.rank, found.top) == (-77, 77, [(10, -1), (40, -2)])
    assert top_of(10, entries, 0).top == []


@pytest.mark.parametrize(
    ("stated", "gpus"),
    [
        ({}, 1),
        ({"tensor_parallel_size": 4}, 4),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 4),
        ({"tensor_parallel_size": 4, "nnodes": 2}, 2),
        ({"nnodes": 2}, 1),
    ],
)
def test_gpus_of_this_host(stated: dict[str, Any], gpus: int) -> None:
    assert host_gpus(stated) == gpus
