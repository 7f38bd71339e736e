"""Train the demo adapters with PEFT and show what each of them changes.

    python examples/adapters/train.py [--base stories260K] [NAME ...]        (default: all recipes)
    python examples/adapters/train.py NAME --base BASE --out DIRECTORY [--steps N]

Reads the converted base models under models/, writes examples/adapters/<base>/<name>/ in bf16, and renews results.json
and RESULTS.md; with --out it writes the one adapter there instead, and touches nothing else. It computes in fp32, or in
bf16 where this host is faster in it. The training text is made by text/ or lies there; see recipes.py for the forms.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from pace import fast_dtype, time_left
from peft import LoraConfig, PeftModel, get_peft_model
from recipes import HUB_ID, RECIPES, STORIES, Recipe
from report import write_report
from rich.console import Console
from rich.progress import Progress
from safetensors.torch import load_file, save_file
from text.chat_text import pairs
from text.story_text import stories
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging

HERE = Path(__file__).parent
MODELS = HERE.parents[1] / "models"
SEED = 20240217
HELD_OUT = 16
PROBE_TOKENS = 70
IGNORED = -100
"""The label that the loss of transformers leaves out."""

Example = tuple[list[int], list[int]]
"""(token ids, labels) of equal length; labels of the prompt are IGNORED."""


def load_base(recipe: Recipe, dtype: torch.dtype) -> PreTrainedModel:
    directory = MODELS / recipe.base
    if not directory.is_dir():
        raise SystemExit(f"{directory} is missing: run `make demo-model` first")
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)


def examples(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> list[Example]:
    """All training examples of a recipe, shuffled; those over its length are left out."""
    if recipe.base == STORIES:
        texts = stories(recipe.name, 400, SEED)
        made = [([*ids, tokenizer.bos_token_id],) * 2 for ids in tokenizer(texts).input_ids]
    else:
        made = [chat_example(tokenizer, question, answer) for question, answer in pairs(recipe.name, SEED)]
    return [example for example in made if len(example[0]) <= recipe.max_tokens]


def chat_example(tokenizer: PreTrainedTokenizerFast, question: str, answer: str) -> Example:
    """One turn in the base's chat template; only the answer and its end count for the loss."""
    prompt = chat_prompt(tokenizer, question)
    reply = tokenizer(answer + tokenizer.eos_token, add_special_tokens=False).input_ids
    return [*prompt, *reply], [*[IGNORED] * len(prompt), *reply]


def chat_prompt(tokenizer: PreTrainedTokenizerFast, question: str) -> list[int]:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )
    return tokenizer(text, add_special_tokens=False).input_ids


def collate(chosen: list[Example]) -> dict[str, torch.Tensor]:
    """Right-padded input_ids, attention_mask and labels, i64[batch, longest]."""
    longest = max(len(ids) for ids, _ in chosen)

    def padded(rows: list[list[int]], filler: int) -> torch.Tensor:
        return torch.tensor([[*row, *[filler] * (longest - len(row))] for row in rows])

    return {
        "input_ids": padded([ids for ids, _ in chosen], 0),
        "attention_mask": padded([[1] * len(ids) for ids, _ in chosen], 0),
        "labels": padded([labels for _, labels in chosen], IGNORED),
    }


def train(recipe: Recipe, model: PeftModel, data: list[Example], progress: Progress) -> list[float]:
    """AdamW with a linear decay to a tenth; the loss of each step. Says ten times or so how far it is: as a bar with
    the time left on a terminal, in lines elsewhere."""
    draw = random.Random(SEED)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=recipe.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=recipe.steps)
    losses: list[float] = []
    model.train()
    start = time.perf_counter()
    for step in progress.track(range(1, recipe.steps + 1), description=f"{recipe.base} {recipe.name}"):
        loss = model(**collate(draw.sample(data, recipe.batch))).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
        if progress.disable and (step == 1 or step % max(1, recipe.steps // 10) == 0) and step < recipe.steps:
            left = time_left(step, recipe.steps, time.perf_counter() - start)
            progress.console.print(f"step {step} of {recipe.steps}: loss {losses[-1]:.3f}, {left}")
    model.eval()
    return losses


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, data: list[Example]) -> float:
    """Mean loss over batches of four examples that were set aside."""
    batches = [collate(data[start : start + 4]) for start in range(0, len(data), 4)]
    return sum(model(**batch).loss.item() for batch in batches) / len(batches)


def save_adapter(recipe: Recipe, model: PeftModel, directory: Path) -> None:
    """Write config and bf16 weights as PEFT does, without what depends on this machine or on the hash seed."""
    config = model.peft_config["default"]
    config.base_model_name_or_path = HUB_ID[recipe.base]
    with tempfile.TemporaryDirectory() as scratch:
        model.save_pretrained(scratch, save_embedding_layers=False)
        weights = load_file(Path(scratch) / "adapter_model.safetensors")
        settings = json.loads((Path(scratch) / "adapter_config.json").read_bytes())
    settings["target_modules"] = sorted(settings["target_modules"])
    directory.mkdir(parents=True, exist_ok=True)
    half = {name: weight.to(torch.bfloat16) for name, weight in weights.items()}
    save_file(half, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    (directory / "adapter_model.safetensors").chmod(0o644)
    (directory / "adapter_config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


@torch.no_grad()
def answer(recipe: Recipe, model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, probe: str) -> str:
    """Greedy continuation of a story, or answer to a question."""
    ids = tokenizer(probe).input_ids if recipe.base == STORIES else chat_prompt(tokenizer, probe)
    prompt = torch.tensor([ids])
    out = model.generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=PROBE_TOKENS, do_sample=False
    )[0]
    if recipe.base == STORIES:
        return tokenizer.decode(out, skip_special_tokens=True)[len(probe) :]
    return tokenizer.decode(out[len(ids) :], skip_special_tokens=True)


def training_dtype(recipe: Recipe) -> torch.dtype:
    config = AutoConfig.from_pretrained(MODELS / recipe.base)
    return fast_dtype(config.hidden_size, config.intermediate_size)


def run(recipe: Recipe, directory: Path, progress: Progress, samples: bool) -> dict[str, Any]:
    """Train, save to the directory, load what was saved and compare it in fp32 with the base; `samples`: by the probes'
    answers, too, which takes longer than the training of a few steps."""
    torch.manual_seed(SEED)
    tokenizer = AutoTokenizer.from_pretrained(MODELS / recipe.base)
    data = examples(recipe, tokenizer)
    held_out, data = data[:HELD_OUT], data[HELD_OUT:]
    config = LoraConfig(task_type="CAUSAL_LM", **{**recipe.lora, "target_modules": list(recipe.lora["target_modules"])})
    dtype = training_dtype(recipe)
    progress.console.print(f"{recipe.base}/{recipe.name}: {recipe.steps} steps in {str(dtype).removeprefix('torch.')}")
    model = get_peft_model(load_base(recipe, dtype), config)
    start = time.perf_counter()
    losses = train(recipe, model, data, progress)
    seconds = time.perf_counter() - start
    save_adapter(recipe, model, directory)
    base = load_base(recipe, torch.float32)
    base_loss = held_out_loss(base, held_out)
    probes = recipe.probes if samples else ()
    before = [answer(recipe, base, tokenizer, probe) for probe in probes]
    adapted = PeftModel.from_pretrained(base, directory).eval()
    tenth = max(1, recipe.steps // 10)
    return {
        "base": recipe.base,
        "name": recipe.name,
        "lora": recipe.lora,
        "bytes": (directory / "adapter_model.safetensors").stat().st_size,
        "training": {
            "examples": len(data),
            "steps": recipe.steps,
            "batch": recipe.batch,
            "learning_rate": recipe.learning_rate,
            "seconds": round(seconds, 1),
            "loss_first_tenth": round(sum(losses[:tenth]) / tenth, 4),
            "loss_last_tenth": round(sum(losses[-tenth:]) / tenth, 4),
        },
        "held_out_loss": {"base": round(base_loss, 4), "adapter": round(held_out_loss(adapted, held_out), 4)},
        "samples": [
            {"prompt": probe, "base": old, "adapter": answer(recipe, adapted, tokenizer, probe)}
            for probe, old in zip(probes, before, strict=True)
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="recipes to train")
    parser.add_argument("--base", choices=sorted(HUB_ID), help="train only this base's recipes")
    parser.add_argument("--out", type=Path, help="write one adapter to this directory, and no report")
    parser.add_argument("--steps", type=int, help="train for so many steps instead of the recipe's; needs --out")
    arguments = parser.parse_args()
    chosen = [
        recipe
        for recipe in RECIPES
        if arguments.base in (None, recipe.base) and (not arguments.names or recipe.name in arguments.names)
    ]
    if not chosen:
        parser.error(f"no such recipe; known: {', '.join(f'{recipe.base}/{recipe.name}' for recipe in RECIPES)}")
    if arguments.out is not None and len(chosen) != 1:
        parser.error(f"--out takes one adapter, not {len(chosen)}: name it, and its --base")
    if arguments.steps is not None:
        if arguments.out is None or arguments.steps < 1:
            parser.error("--steps is at least 1, and needs --out: the committed adapters follow recipes.py")
        chosen = [dataclasses.replace(recipe, steps=arguments.steps) for recipe in chosen]
    logging.set_verbosity_error()
    warnings.filterwarnings("ignore", ".is_gradient_checkpointing.", FutureWarning)  # PEFT asks it of transformers
    logging.disable_progress_bar()
    console = Console(highlight=False)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        for recipe in chosen:
            directory = arguments.out or HERE / recipe.base / recipe.name
            result = run(recipe, directory, progress, samples=arguments.out is None)
            if arguments.out is None:
                write_report(HERE, result, order=[(known.base, known.name) for known in RECIPES])
            console.print(
                f"{recipe.base}/{recipe.name}: held-out loss {result['held_out_loss']['base']} ->"
                f" {result['held_out_loss']['adapter']} in {result['training']['seconds']} s",
                soft_wrap=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
