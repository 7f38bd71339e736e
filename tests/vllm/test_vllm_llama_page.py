"""The service files of docs/guide/llama-3.1-8b.md, as vLLM's own parser and settings read them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engines.vllm_server import flags
from garnish.settings import Base, node_config
from node_agent.vllm.arguments import engine_arguments
from tests.support.llama_page import llama_services

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
SLOTS = 8
"""Slots as if planned; the plan needs the real base's sizes and a GPU's memory."""
PARSE = """
import json, sys
from vllm.config import CacheConfig, LoRAConfig, ParallelConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
from vllm.utils.argparse_utils import FlexibleArgumentParser

def is_value(found, stated):
    if isinstance(stated, dict):
        return all(getattr(found, name) == each for name, each in stated.items())
    return found in (stated, [stated])

for arguments, flags in json.load(sys.stdin):
    AsyncEngineArgs(**arguments)
    parsed = AsyncEngineArgs.from_cli_args(AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(flags))
    for name, value in arguments.items():
        assert is_value(getattr(parsed, name), value), name
    assert parsed.quantization in (None, *QUANTIZATION_METHODS), parsed.quantization
    ParallelConfig(tensor_parallel_size=parsed.tensor_parallel_size, distributed_executor_backend="mp")
    LoRAConfig(max_lora_rank=parsed.max_lora_rank, max_loras=parsed.max_loras, max_cpu_loras=parsed.max_cpu_loras)
    CacheConfig(cache_dtype=parsed.kv_cache_dtype)
"""


def page_arguments(model: Path) -> list[dict[str, Any]]:
    """Returns the arguments that a node of each service file with vLLM gives to vLLM. `model`: a model's directory,
    which must be there."""
    base, state = Base(model, "meta-llama/Llama-3.1-8B-Instruct"), Path("/state")
    services = [service for service in llama_services() if service.node.engine == "vllm"]
    configs = [node_config(each, base, state, node_id="node-1", gateway_url="http://gateway") for each in services]
    return [engine_arguments(config.engine, SLOTS) for config in configs]


def parse(python: Path, *arguments: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    text = json.dumps([(each, list(flags(each))) for each in arguments])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [str(python), "-c", PARSE], input=text, env=environment, capture_output=True, text=True, timeout=1500
    )


def test_vllm_takes_the_arguments(python: Path, base: Path) -> None:
    found = page_arguments(base)
    assert [each.get("quantization") for each in found] == [None, "fp8", None]
    assert [each.get("tensor_parallel_size") for each in found] == [None, None, 2]
    done = parse(python, *found)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [{"kv_cache_dtype": "fp9"}, {"max_lora_ranks": 16}, {"quantization": "fp9"}])
def test_vllm_refuses_what_is_misspelt(python: Path, base: Path, wrong: dict[str, Any]) -> None:
    done = parse(python, page_arguments(base)[1] | wrong)
    ((name, value),) = wrong.items()
    assert done.returncode != 0
    reason = done.stderr.strip().splitlines()[-1]
    assert name in reason or str(value) in reason
