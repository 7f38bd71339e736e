"""Runs an adapter with transformers and PEFT alone: `python -m node_agent.peft_process`, with a PeftJob on standard
input.

No code of the node computes here, so the answers are an independent reference. Writes one JSON object per line: Loaded,
then a PeftAnswer per prompt, or Failed.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapters.errors import AdapterError
from adapters.peft_config import CONFIG_FILE, WEIGHTS_FILE, with_numbers
from adapters.peft_format import read_peft
from adapters.tensor_names import plain_name
from adapters.wrapped_names import find_wrapper
from cluster.text import end_token_ids
from node_agent.child import die_with_parent, read_config, take_output
from node_agent.collector import settle, stop_collecting
from node_agent.peft_types import Failed, Loaded, PeftAnswer, PeftJob, PeftPrompt, Position

if TYPE_CHECKING:
    import torch

WARM_UP_TOKENS = 2


class PeftAlone:
    """Base model with one adapter, loaded as users of PEFT do. `scratch` is a folder for temporary files.

    Raises OSError, ValueError or RuntimeError.
    """

    def __init__(self, job: PeftJob, scratch: Path) -> None:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar

        from node_agent.device import DTYPES, pick_device

        disable_progress_bar()
        self.device = pick_device(job.device)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(job.model_dir, local_files_only=True)
        self._ends = sorted(end_token_ids(Path(job.model_dir)))
        self._max_tokens = job.max_tokens
        base = AutoModelForCausalLM.from_pretrained(
            job.model_dir, dtype=DTYPES.get(job.dtype, "auto"), local_files_only=True
        )
        self.dtype = str(base.dtype).removeprefix("torch.")
        modules = [name for name, _ in base.named_modules()]
        adapter_dir = with_plain_files(Path(job.adapter_dir), scratch, modules)
        # the node computes adapters in its own dtype; PEFT would use float32 by default
        model: Any = PeftModel.from_pretrained(base, adapter_dir, autocast_adapter_dtype=False)
        self.model: Any = model.to(base.dtype).eval().to(self.device)

    def encode(self, prompt: PeftPrompt) -> list[int]:
        if prompt.messages is None:
            ids: list[int] = self.tokenizer(prompt.text).input_ids
            return ids
        text = self.tokenizer.apply_chat_template(prompt.messages, add_generation_prompt=True, tokenize=False)
        chat_ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return chat_ids

    def generate(self, ids: list[int], count: int) -> list[int]:
        """Returns at most `count` tokens, generated greedily by transformers. An end token is included."""
        import torch
        from transformers import GenerationConfig

        settings = GenerationConfig(
            do_sample=False,
            max_new_tokens=count,
            eos_token_id=self._ends or None,
            pad_token_id=next(iter(self._ends), 0),
        )
        prompt = torch.tensor([ids], device=self.device)
        with torch.inference_mode():
            out = self.model.generate(
                input_ids=prompt, attention_mask=torch.ones_like(prompt), generation_config=settings
            )
        tokens: list[int] = out[0, len(ids) :].tolist()
        return tokens

    def positions(self, ids: list[int], prompt: PeftPrompt) -> list[Position]:
        """Returns a Position for each token of the function's answer. It is teacher-forced with the function's tokens
        rather than PEFT's, so that every position is comparable."""
        import torch

        if not prompt.tokens:
            return []
        input_ids = torch.tensor([ids + prompt.tokens[:-1]], device=self.device)
        with torch.inference_mode():
            out = self.model(input_ids=input_ids, use_cache=False, logits_to_keep=len(prompt.tokens))
        rows = out.logits[0].float()
        return [_position(row, token, top) for row, token, top in zip(rows, prompt.tokens, prompt.top, strict=True)]

    def answer(self, prompt: PeftPrompt) -> PeftAnswer:
        ids = self.encode(prompt)
        started_at = time.perf_counter()
        tokens = self.generate(ids, self._max_tokens)
        seconds = time.perf_counter() - started_at
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return PeftAnswer(len(ids), tokens, text, seconds, self.positions(ids, prompt))


def with_plain_files(folder: Path, scratch: Path, modules: Collection[str]) -> Path:
    """Returns the adapter's folder, or a converted copy in `scratch` if PEFT would not read it as a deploy does.
    `modules`: names of the base's modules.

    PEFT finds no tensors whose names have an adapter's name or a wrapper's part, and would answer like the base model.
    Raises InvalidAdapter, OSError.
    """
    from safetensors.torch import load_file, save_file

    config = (folder / CONFIG_FILE).read_bytes()
    written = read_peft(config, folder / WEIGHTS_FILE)
    wrapped = find_wrapper(written.tensors, modules)
    unwrapped = {name: name for name in written.tensors} if wrapped is None else wrapped[1]
    plain = {name: plain_name(unwrapped[name]) for name in written.tensors}
    fields = with_numbers(written.config)
    if fields == written.config and not written.warnings and all(old == new for old, new in plain.items()):
        return folder
    if wrapped is not None and wrapped[0].is_language_model:  # its patterns are for the multimodal model's names
        names = {name.partition(".lora_")[0].removeprefix("base_model.model.") for name in plain.values()}
        fields["target_modules"] = sorted(names)
    tensors = load_file(folder / WEIGHTS_FILE)
    save_file({plain[name]: each for name, each in tensors.items()}, scratch / WEIGHTS_FILE, metadata={"format": "pt"})
    (scratch / CONFIG_FILE).write_text(json.dumps(fields))
    return scratch


def _position(row: torch.Tensor, token: int, top: list[int]) -> Position:
    best = row.topk(2)
    first, second = best.values.tolist()
    logprobs = row.log_softmax(dim=-1)[top].tolist() if top else []
    return Position(int(best.indices[0]), first - second, first - float(row[token]), abs(first), logprobs)


def main() -> int:
    job = read_config(PeftJob)
    die_with_parent(job.parent)
    report = take_output()
    warnings.simplefilter("ignore")
    started_at = time.perf_counter()
    stop_collecting()
    try:
        with tempfile.TemporaryDirectory(prefix="garnish-") as scratch:
            alone = PeftAlone(job, Path(scratch))
        settle()
        alone.generate(alone.encode(job.prompts[0]), WARM_UP_TOKENS)
        report(Loaded(str(alone.device), alone.dtype, time.perf_counter() - started_at))
        for prompt in job.prompts:
            report(alone.answer(prompt))
    except ImportError as error:
        report(Failed(f"{error.name or error} is not installed"))
        return 1
    except (OSError, ValueError, RuntimeError, AdapterError) as error:
        report(Failed((str(error).strip() or type(error).__name__).splitlines()[0]))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
