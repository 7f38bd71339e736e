"""What the node calls of vLLM, against the Python files of both versions that it takes (0.33's were read, not run)."""

from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path
from typing import Any, Literal

import pytest
from msgspec.structs import replace

from cluster.messages import GenerateRequest, Grammar, Sampling
from node_agent.config import EngineConfig
from node_agent.engine.intake import request_of
from node_agent.vllm import cpu_lora, process
from node_agent.vllm.arguments import COUNTS, DEFAULTS, REFUSED, VERSIONS, engine_arguments
from node_agent.vllm.driver import AsyncEngine
from node_agent.vllm.sampling import structured_outputs, vllm_parameters
from node_agent.vllm.worker_extension import MENDED
from tests.support.environments import VLLM
from tests.support.vllm_interface import RECORDS, read_interface, signature

FOUND: dict[str, Any] = json.loads(RECORDS.read_text())
CONFIG = EngineConfig(model_dir="/models/base", base_id="base", registry="/r", engine="vllm")
READ = {
    "CacheConfig": "num_gpu_blocks block_size",
    "CompletionOutput": "token_ids logprobs",
    "DeviceConfig": "device_type",
    "EngineDeadError": "",
    "LoRAConfig": "max_loras max_lora_rank",
    "LoRALayerWeights": "lora_a lora_b scaling",
    "LoRAModel": "loras clone",
    "LoRAModelManager": "lora_index_to_id lora_slots list_adapters",
    "LoRAModelRunnerMixin": "lora_manager",
    "Logprob": "logprob rank",
    "ModelConfig": "dtype max_model_len get_vocab_size",
    "ParallelConfig": "worker_extension_cls",
    "RequestOutput": "outputs prompt_logprobs num_cached_tokens finished",
    "RequestOutputKind": "DELTA",
    "SamplingParams": "_bad_words_token_ids output_kind",
    "SchedulerConfig": "max_num_seqs max_num_batched_tokens",
    "VllmConfig": "lora_config cache_config model_config scheduler_config device_config",
    "WorkerLoRAManager": "_adapter_manager lora_config embedding_modules",
}
"""Attributes that the node's code reads or sets, by class"""
CALLS = {
    ("LoRAModel", "clone"): 2,
    ("LoRAModelManager", "activate_adapter"): 2,
    ("LoRAModelManager", "add_adapter"): 2,
    ("LoRAModelManager", "create_dummy_lora"): 4,
    ("LoRAModelManager", "list_adapters"): 1,
    ("AsyncLLM", "from_engine_args"): 2,
    ("ModelConfig", "get_vocab_size"): 1,
    ("Platform", "is_cpu"): 1,
}
"""Number of arguments, the object included, of calls outside the interface of the driver"""
KINDS: tuple[Literal["json", "regex", "choice", "lark"], ...] = ("json", "regex", "choice", "lark")
NOT_ARGUMENTS = {"lora_modules", "api_server_count"}
"""Refused names that only vLLM's server has"""

both = pytest.mark.parametrize("version", sorted(FOUND))


def attributes(version: str, *classes: str) -> set[str]:
    return {name for each in classes for name in FOUND[version]["classes"][each]["attributes"].split()}


def test_both_supported_versions_were_read() -> None:
    assert sorted(".".join(version.split(".")[:2]) for version in FOUND) == sorted(VERSIONS)


@both
def test_the_engine_has_the_methods_that_the_driver_calls(version: str) -> None:
    """Each call that the driver's interface allows is one that vLLM takes."""
    methods = FOUND[version]["classes"]["AsyncLLM"]["methods"]
    names = [name for name in vars(AsyncEngine) if not name.startswith("_")]
    assert len(names) > 5
    for name in names:
        ours = inspect.signature(getattr(AsyncEngine, name))
        theirs = signature(methods[name])
        parameters = list(ours.parameters.values())
        positional = [each.name for each in parameters if each.kind is not each.KEYWORD_ONLY]
        keywords = {each.name: each.name for each in parameters if each.kind is each.KEYWORD_ONLY}
        bound = theirs.bind(*positional, **keywords).arguments
        assert all(bound[each.name] == each.name for each in parameters), (name, bound)


@both
def test_other_calls_have_as_many_arguments(version: str) -> None:
    for (owner, name), count in CALLS.items():
        signature(FOUND[version]["classes"][owner]["methods"][name]).bind(*range(count))


@both
def test_the_attributes_are_there(version: str) -> None:
    for name, read in READ.items():
        assert not set(read.split()) - attributes(version, name), name
    assert "vllm_config" in attributes(version, "AsyncLLM")
    assert {"prompt_token_ids", "cache_salt"} <= attributes(version, "TokensPrompt", "_PromptOptions")
    assert FOUND[version]["classes"]["LoRARequest"]["attributes"].split()[:3] == [
        "lora_name",
        "lora_int_id",
        "lora_path",
    ]


@both
def test_engine_arguments_are_known_by_their_names(version: str) -> None:
    """Those that the node sets, checks or refuses."""
    sets = engine_arguments(replace(CONFIG, max_rows=3, dtype="float32", prefix_cache="off", kv_memory=1 << 28), 4)
    known = attributes(version, "EngineArgs", "AsyncEngineArgs")
    names = {*sets, *COUNTS, *DEFAULTS, *REFUSED}
    assert names - known == NOT_ARGUMENTS


@both
def test_sampling_parameters_are_known_by_their_names(version: str) -> None:
    request = request_of(GenerateRequest("r", "", "t", [1], 4, Sampling(bad_words=[[3]], logprobs=2), 60.0))
    assert not set(vllm_parameters(request, {2})) - attributes(version, "SamplingParams")
    forms = attributes(version, "StructuredOutputsParams")
    for kind in KINDS:
        assert not set(structured_outputs(Grammar(kind, "[]"))) - forms


@both
def test_environment_variables_are_known(version: str) -> None:
    tree = ast.parse(Path(process.__file__).read_text())
    ours = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("VLLM_")
    }
    assert ours and not ours - set(FOUND[version]["variables"].split())


def test_replaced_functions_take_what_vllms_own_take() -> None:
    mended = [version for version in FOUND if version.startswith(MENDED)]
    assert mended
    for version in mended:
        for name, parameters in FOUND[version]["functions"].items():
            ours = inspect.signature(getattr(cpu_lora, name)).parameters.values()
            theirs = signature(parameters).parameters.values()
            assert [(each.name, each.default is each.empty) for each in ours] == [
                (each.name, each.default is each.empty) for each in theirs
            ]


@pytest.mark.vllm
def test_the_environments_files_are_those_that_were_read() -> None:
    """The records are made by a script from vLLM's files; so they are here."""
    folders = list(VLLM.glob("lib/python*/site-packages/vllm"))
    if not folders:
        pytest.skip(f"NOT RUN: no vLLM in {VLLM}; make it by `make .engines/vllm`")
    assert read_interface(folders[0]) == FOUND["0.32.0"]
