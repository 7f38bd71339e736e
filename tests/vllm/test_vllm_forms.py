"""Forms of adapters that vLLM's own check takes and refuses, against the check of deploys. No engine is started."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from adapters.base_model import load_base_model
from adapters.inspector import inspect_once
from adapters.peft_config import BASE_CHANGING_INITS
from adapters.peft_folder import make_loadable
from tests.adapters.test_peft_folder import BASE_MODULES, CONFIG, FORMS, TARGETS, WEIGHTS, made
from tests.support.peft_reference import make_adapter

pytestmark = pytest.mark.vllm

PROGRAM = """
import json, sys
from types import SimpleNamespace
import safetensors
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import parse_fine_tuned_lora_name
answers = {}
for name, folder, rank in json.load(sys.stdin):
    try:
        helper = PEFTHelper.from_local_dir(folder, 512)
        helper.validate_legal(SimpleNamespace(max_lora_rank=rank))
        with safetensors.safe_open(folder + "/adapter_model.safetensors", framework="pt") as file:
            for key in file.keys():
                module, _ = parse_fine_tuned_lora_name(key)
                helper.get_rank_and_scaling(module)
        answers[name] = ""
    except Exception as error:
        answers[name] = str(error) or type(error).__name__
print(json.dumps(answers))
"""


def answers_of_vllm(python: Path, asked: list[tuple[str, str, int]]) -> dict[str, str]:
    """Returns why vLLM refuses each folder, by name; empty where it does not."""
    done = subprocess.run(
        [str(python), "-c", PROGRAM],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=250,
        check=True,
    )
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_vllm_takes_each_form_up_to_its_rank(python: Path, stories_dir: Path, tmp_path: Path) -> None:
    """As deployed, some would be refused."""
    asked, raw = [], []
    for number, name in enumerate(FORMS):
        folder, layout = made(name, stories_dir, tmp_path / str(number))
        raw.append((name, str(shutil.copytree(folder, tmp_path / f"raw{number}")), max(layout.ranks)))
        make_loadable(folder, layout.ranks, BASE_MODULES)
        asked.append((name, str(folder), max(layout.ranks)))
    assert answers_of_vllm(python, asked) == dict.fromkeys(FORMS, "")
    assert sum(bool(reason) for reason in answers_of_vllm(python, raw).values()) == 7


REFUSED: dict[str, dict[str, Any]] = {
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "use_dora": {"use_dora": True},
    "lora_bias": {"lora_bias": True},
    "bias": {"bias": "lora_only"},
    "alora_invocation_tokens": {"alora_invocation_tokens": [1]},
    "layer_replication": {"layer_replication": [[0, 1]]},
    "use_bdlora": {"use_bdlora": {"a": 1}},
    "use_qalora": {"use_qalora": True},
    **{init: {"init_lora_weights": init} for init in BASE_CHANGING_INITS if init != "lora_ga"},
}
"""Forms that vLLM's PEFTHelper refuses, by the field or value that its reason names."""


def test_what_vllm_refuses_is_refused_at_deploy_with_the_reason(
    python: Path, stories_dir: Path, tmp_path: Path
) -> None:
    adapter = make_adapter(stories_dir, tmp_path / "a", 3, r=4, target_modules=TARGETS)
    config, asked = json.loads((adapter / CONFIG).read_bytes()), []
    for name, fields in REFUSED.items():
        folder = shutil.copytree(adapter, tmp_path / name)
        (folder / CONFIG).write_text(json.dumps(config | fields))
        asked.append((name, str(folder), 8))
        inspection = inspect_once((folder / CONFIG).read_bytes(), folder / WEIGHTS, load_base_model(stories_dir))
        assert [p.tensor for p in inspection.problems if p.tensor.startswith(f"{CONFIG}#")] == [
            f"{CONFIG}#{next(iter(fields))}"
        ]
        assert inspection.problems[0].problem
    reasons = answers_of_vllm(python, asked)
    assert all(reasons.values()), reasons
