"""The figures of docs/guide/llama-3.1-8b.md, from the code that allocates and transformers' own model."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from adapters.base_model import PROJECTIONS, BaseModel, projection_widths
from adapters.model_families import FAMILIES
from garnish.config import load_service_file
from gateway.config import GatewayConfig
from node_agent.adapter_memory.layout import ROW_ALIGN, lay_out_uniform
from node_agent.adapter_memory.pages import choose_page_size
from node_agent.runner.transformers_runner import ROPE_TYPES

PAGE = (Path(__file__).parents[2] / "docs" / "guide" / "llama-3.1-8b.md").read_text()
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


def test_its_service_file(tmp_path: Path) -> None:
    (found,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    (tmp_path / "llama.yml").write_text(found)
    service = load_service_file(tmp_path / "llama.yml")
    assert (service.node.adapter_memory, service.node.kv_memory) == (2 * GIB, 4 * GIB)
    assert service.base_model == "meta-llama/Llama-3.1-8B-Instruct"
