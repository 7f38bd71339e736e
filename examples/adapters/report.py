"""results.json and RESULTS.md: losses and samples of the demo adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

INTRO = """# What the demo adapters change

Made by `examples/adapters/train.py` together with `results.json`; don't edit by hand. Losses are means per token on 16
examples that were set aside; they come from the same templates and files as the training text, so they show that the
manner was learnt, not how well it carries over. For that, see the samples, whose prompts are not in the text: greedy,
in fp32, from the adapters as they are committed.
"""


def write_report(folder: Path, result: dict[str, Any], order: list[tuple[str, str]]) -> None:
    """Put one adapter's result into results.json and write RESULTS.md anew from all of them."""
    file = folder / "results.json"
    known: list[dict[str, Any]] = json.loads(file.read_bytes()) if file.exists() else []
    by_key = {(entry["base"], entry["name"]): entry for entry in [*known, result]}
    results = [by_key[key] for key in order if key in by_key]
    file.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    parts = [INTRO, _table(results), *(_samples(entry) for entry in results)]
    (folder / "RESULTS.md").write_text("\n".join(parts))


def _table(results: list[dict[str, Any]]) -> str:
    lines = [
        "| base | adapter | LoRA | KiB | steps | held-out loss, base | with adapter |",
        "|---|---|---|---|---|---|---|",
    ]
    for entry in results:
        loss = entry["held_out_loss"]
        lines.append(
            f"| {entry['base']} | {entry['name']} | {_form(entry['lora'])} | {entry['bytes'] / 1024:.0f}"
            f" | {entry['training']['steps']} | {loss['base']:.3f} | {loss['adapter']:.3f} |"
        )
    return "\n".join(lines) + "\n"


def _form(lora: dict[str, Any]) -> str:
    targets = ", ".join(name.removesuffix("_proj") for name in lora["target_modules"])
    form = f"r={lora['r']} alpha={lora['lora_alpha']} on {targets}"
    for name, words in (
        ("use_rslora", "rsLoRA"),
        ("rank_pattern", "rank pattern"),
        ("alpha_pattern", "alpha pattern"),
        ("layers_to_transform", "some layers"),
    ):
        form += f", {words}" if lora.get(name) else ""
    return form


def _samples(entry: dict[str, Any]) -> str:
    lines = [f"## {entry['base']} / {entry['name']}\n"]
    for sample in entry["samples"]:
        lines.append("```text")
        lines += [f"prompt:  {sample['prompt']}", f"base:    {sample['base']}", f"adapter: {sample['adapter']}"]
        lines.append("```\n")
    return "\n".join(lines)
