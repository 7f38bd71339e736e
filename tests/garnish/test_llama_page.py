"""The figures of docs/guide/llama-3.1-8b.md, from the code that allocates and transformers' own model."""

from __future__ import annotations

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from adapters.base_model import PROJECTIONS, BaseModel, projection_widths
from adapters.model_families import FAMILIES, ROPE_TYPES
from garnish.errors import StartError
from garnish.up import prepare
from gateway.config import GatewayConfig
from node_agent.adapter_memory.layout import ROW_ALIGN, lay_out_uniform
from node_agent.adapter_memory.pages import choose_page_size
from node_agent.gpu.devices import Gpu
from node_agent.vllm.arguments import host_gpus
from tests.support.llama_page import PAGE, llama_services

MIB, GIB = 1 << 20, 1 << 30
CONFIG = {  # what meta-llama/Llama-3.1-8B-Instruct has in its config.json
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}


BASE = BaseModel("llama", "0" * 64, "llama", 32, 4096, 128256, 131072, projection_widths(CONFIG))


def pages_of(rank: int) -> tuple[int, int]:
    """(pages of an adapter on all projections, bytes of a page)."""
    size = choose_page_size(BASE, 2)
    return lay_out_uniform(BASE, rank, range(len(PROJECTIONS)), 2, size // ROW_ALIGN).pages, size


def test_weights_and_context() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG), dtype=torch.bfloat16)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert f"{parameters:,} parameters x 2 | {parameters * 2 / GIB:.2f} GiB" in PAGE
    assert 2 * BASE.kv_elements == 128 << 10
    assert 4 * GIB == 32_768 * (128 << 10) and GIB // (128 << 10) == 8192


def test_adapters() -> None:
    widths = sum(d_in + d_out for d_in, d_out in projection_widths(CONFIG))
    assert f"{widths:,} is the sum" in PAGE
    assert widths * 32 * 16 * 2 == 80 * MIB
    for rank, size in ((16, 82), (64, 322)):
        pages, page = pages_of(rank)
        assert (page, pages * page) == (2 * MIB, size * MIB)
        assert f"{size} MiB |" in PAGE
    assert 2 * GIB // (2 * MIB) // pages_of(16)[0] == 24
    limit = next(field.default for field in msgspec.structs.fields(GatewayConfig) if field.name == "deploy_body")
    assert [limit // (widths * 32 * size) for size in (4, 2)] == [51, 102]


def test_what_it_says_is_served() -> None:
    assert "llama" in FAMILIES
    assert "llama3" in ROPE_TYPES


def test_vllms_slots_and_quantised_weights() -> None:
    widths = projection_widths(CONFIG)
    slot = sum(d_in + d_out for d_in, d_out in widths) * CONFIG["num_hidden_layers"] * 16 * 2
    assert slot == 80 * MIB and "| 640 MiB |" in PAGE and 8 * slot == 640 * MIB
    assert "4 x 640 MiB | 2.5 GiB" in PAGE and 4 * 640 * MIB == 2.5 * GIB
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG), dtype=torch.bfloat16)
    total = sum(parameter.numel() for parameter in model.parameters())
    linear = sum(
        module.weight.numel() for module in model.model.layers.modules() if isinstance(module, torch.nn.Linear)
    )
    assert linear == sum(d_in * d_out for d_in, d_out in widths) * CONFIG["num_hidden_layers"]
    assert f"{linear:,} are in the layers' linear modules" in PAGE
    assert f"weights are {(linear + 2 * (total - linear)) / GIB:.2f} GiB" in PAGE
    assert 16 * GIB == 131_072 * (128 << 10)


def test_a_slot_on_each_of_two_gpus() -> None:
    """vLLM divides B of the modules whose outputs it divides, and A of those whose inputs it divides."""
    divided_inputs = ("o", "down")
    halves = [
        d_in // 2 + d_out if name in divided_inputs else d_in + d_out // 2
        for name, (d_in, d_out) in zip(PROJECTIONS, projection_widths(CONFIG), strict=True)
    ]
    assert 16 * sum(halves) * 32 * 2 == 54 * MIB and "takes 54 MiB on each" in PAGE


def test_its_service_files() -> None:
    own, *driven = llama_services()
    assert (own.node.adapter_memory, own.node.kv_memory) == (2 * GIB, 4 * GIB)
    assert {service.base_model for service in (own, *driven)} == {"meta-llama/Llama-3.1-8B-Instruct"}
    stated = [service.node.vllm for service in driven]
    assert [service.node.engine for service in (own, *driven)] == ["garnish", "vllm", "vllm", "vllm"]
    assert [each.get("quantization") for each in stated] == [None, "fp8", None]
    assert [host_gpus(each) for each in stated] == [1, 1, 2]


@pytest.mark.parametrize("gpus", [0, 1, 2, 4])
def test_two_gpus_are_one_node(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    found = [Gpu(index=index, uuid=f"GPU-{index}") for index in range(gpus)][:2]  # the file's `devices`
    monkeypatch.setattr(prepare, "node_gpus", lambda device, devices: found)
    *_, two = llama_services()
    if gpus == 1:
        with pytest.raises(
            StartError, match=r"node\.vllm: a node needs 2 GPUs, and nodes may have 1 GPUs of this host"
        ):
            prepare.node_count(two, None)
    else:
        assert prepare.node_count(two, None) == 1
