"""Reading of vLLM's Python files: parameters of functions and attributes of classes. Nothing of vLLM is imported.

`python -m tests.support.vllm_interface VERSION FOLDER` records what the files in FOLDER say in RECORDS, where FOLDER is
the package `vllm` of a wheel or of an environment.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).parents[1] / "data" / "vllm_interfaces.json"
CLASSES = {
    "config/cache.py": ("CacheConfig",),
    "config/device.py": ("DeviceConfig",),
    "config/lora.py": ("LoRAConfig",),
    "config/model.py": ("ModelConfig",),
    "config/parallel.py": ("ParallelConfig",),
    "config/scheduler.py": ("SchedulerConfig",),
    "config/vllm.py": ("VllmConfig",),
    "engine/arg_utils.py": ("EngineArgs", "AsyncEngineArgs"),
    "inputs/llm.py": ("_PromptOptions", "TokensPrompt"),
    "logprobs.py": ("Logprob",),
    "lora/lora_model.py": ("LoRAModel",),
    "lora/lora_weights.py": ("LoRALayerWeights",),
    "lora/model_manager.py": ("LoRAModelManager",),
    "lora/request.py": ("LoRARequest",),
    "lora/worker_manager.py": ("WorkerLoRAManager",),
    "outputs.py": ("RequestOutput", "CompletionOutput"),
    "platforms/interface.py": ("Platform",),
    "sampling_params.py": ("SamplingParams", "RequestOutputKind", "StructuredOutputsParams"),
    "v1/engine/async_llm.py": ("AsyncLLM",),
    "v1/engine/exceptions.py": ("EngineDeadError",),
    "v1/worker/lora_model_runner_mixin.py": ("LoRAModelRunnerMixin",),
}
"""Classes that a node with vLLM uses, by file."""
FUNCTIONS = {"lora/ops/torch_ops/lora_ops.py": ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice")}
METHODS = (
    "abort", "activate_adapter", "add_adapter", "add_lora", "clone", "collective_rpc", "create_dummy_lora",
    "from_engine_args", "generate", "get_vocab_size", "is_cpu", "list_adapters", "remove_lora", "shutdown",
)  # fmt: skip
"""Methods whose parameters are recorded."""
VARIABLES = ("envs.py", "environment_variables")
"""File and name of the dictionary of vLLM's environment variables."""

Parameters = str
"""Names in order with spaces between: `name=` has a default; `*` and `**name` as in Python."""


def read_interface(folder: Path) -> dict[str, Any]:
    """Returns the attributes and methods of CLASSES, the parameters of FUNCTIONS, and the environment variables."""
    classes: dict[str, Any] = {}
    for file, names in CLASSES.items():
        found = {node.name: node for node in _parse(folder / file).body if isinstance(node, ast.ClassDef)}
        classes |= {name: _read_class(found[name]) for name in names}
    functions: dict[str, Parameters] = {}
    for file, names in FUNCTIONS.items():
        defined = {node.name: node for node in _parse(folder / file).body if isinstance(node, ast.FunctionDef)}
        functions |= {name: _parameters(defined[name]) for name in names}
    return {"classes": classes, "functions": functions, "variables": _read_variables(folder)}


def signature(parameters: Parameters) -> inspect.Signature:
    """Returns a signature to which arguments can be bound."""
    found: list[inspect.Parameter] = []
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    for parameter in parameters.split():
        if parameter.startswith("*"):
            name = parameter.lstrip("*")
            variadic = inspect.Parameter.VAR_KEYWORD if parameter.startswith("**") else inspect.Parameter.VAR_POSITIONAL
            kind = inspect.Parameter.KEYWORD_ONLY
            found += [inspect.Parameter(name, variadic)] if name else []
        else:
            default = None if parameter.endswith("=") else inspect.Parameter.empty
            found.append(inspect.Parameter(parameter.rstrip("="), kind, default=default))
    return inspect.Signature(found)


def _parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def _read_class(node: ast.ClassDef) -> dict[str, Any]:
    """Returns the names of attributes in the order of the source, and the parameters of METHODS."""
    attributes: dict[str, None] = {}
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            attributes[each.target.id] = None
        elif isinstance(each, ast.Assign):
            attributes |= {target.id: None for target in each.targets if isinstance(target, ast.Name)}
        elif isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            attributes[each.name] = None
            attributes |= dict.fromkeys(_own_attributes(each))
    functions = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
    methods = {each.name: _parameters(each) for each in functions if each.name in METHODS}
    return {"attributes": " ".join(attributes), "methods": methods}


def _own_attributes(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Returns the attributes of `self` that a method sets."""
    targets: list[ast.expr] = []
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            targets += node.targets
        elif isinstance(node, ast.AnnAssign):
            targets.append(node.target)
    return [
        each.attr
        for each in targets
        if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id == "self"
    ]


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Parameters:
    arguments = function.args
    positional = [each.arg for each in [*arguments.posonlyargs, *arguments.args]]
    required = len(positional) - len(arguments.defaults)
    found = [name if at < required else f"{name}=" for at, name in enumerate(positional)]
    if arguments.vararg is not None:
        found.append(f"*{arguments.vararg.arg}")
    elif arguments.kwonlyargs:
        found.append("*")
    for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(each.arg if default is None else f"{each.arg}=")
    return " ".join([*found, *([f"**{arguments.kwarg.arg}"] if arguments.kwarg is not None else [])])


def _read_variables(folder: Path) -> str:
    file, name = VARIABLES
    for node in _parse(folder / file).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if isinstance(value, ast.Dict) and any(isinstance(each, ast.Name) and each.id == name for each in targets):
            return " ".join(sorted(str(key.value) for key in value.keys if isinstance(key, ast.Constant)))
    raise LookupError(f"{file} has no dictionary {name}")


if __name__ == "__main__":
    version, folder = sys.argv[1:]
    records = json.loads(RECORDS.read_text()) if RECORDS.exists() else {}
    records[version] = read_interface(Path(folder))
    RECORDS.write_text(json.dumps(dict(sorted(records.items())), indent=1) + "\n")
