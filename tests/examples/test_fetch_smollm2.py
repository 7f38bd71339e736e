"""SmolLM2 after conversion: a real assistant through plain transformers, with the tokenizer that it was trained on."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer


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
