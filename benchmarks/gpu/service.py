"""The whole service on a GPU, over HTTP: its start, first tokens cold and warm, and thirty-two callers at once.

A base with drawn weights and the tokenizer of `--model`, and adapters of rank 64 on q, k and v, as `garnish up`
deploys them from serverless.yml; settings are the defaults but for device memory. Twice: with room for all adapters
(`roomy`), and for a third (`tight`), where calls in turn find theirs in host memory. Calls of `lengths` words come one
at a time; each prompt is drawn.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig

from benchmarks.common.http_service import HttpService
from benchmarks.common.invoke import Answer, Caller, check, until_measured
from benchmarks.common.latency import summary
from benchmarks.common.load import closed_loop, open_session, plan
from benchmarks.common.report import SMOLLM2, arguments, publish, report, save
from benchmarks.many.cells import operator
from tests.support.random_model import SHAPES, random_loader, write_adapters

RANK = 64
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
VOCABULARY = 49_152
"""Vocabulary of the tokenizer: the shape's is smaller."""
ROOM_SHARE = 3


@dataclass(frozen=True)
class Sizes:
    adapters: int = 12
    lengths: tuple[int, ...] = (64, 256, 1024)
    """Words; prompts have a few tokens more."""
    calls: int = 12
    """calls of each length, one after another"""
    callers: int = 32
    requests: int = 128
    load_prompt: int = 128
    load_tokens: int = 64
    measuring_s: float = 15.0


QUICK = Sizes(3, (8,), 3, 2, 4, 4, 3, 0.0)


def write_model(directory: Path, shape: str, tokenizer: Path, device: torch.device, seed: int) -> Path:
    """The base with its weights: a service reads them from files."""
    directory.mkdir(parents=True)
    size = {**SHAPES[shape], "vocab_size": VOCABULARY}
    LlamaConfig(**size, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2).save_pretrained(directory)
    model = random_loader(seed, "sdpa")(directory, device, torch.bfloat16)
    model.save_pretrained(directory)
    for name in TOKENIZER_FILES:
        shutil.copy(tokenizer / name, directory)
    return directory


class Bench:
    def __init__(self, root: Path, shape: str, device: str, tokenizer: Path, sizes: Sizes, seed: int) -> None:
        self._root, self._device, self.sizes, self.seed = root, device, sizes, seed
        self._model = write_model(root / shape, shape, tokenizer, torch.device(device), seed)
        self._paths = write_adapters(root / "adapters", shape, RANK, sizes.adapters, seed)
        self._bytes = (self._paths[0] / "adapter_model.safetensors").stat().st_size
        self.functions = [f"a{i}" for i in range(sizes.adapters)]

    def rows(self) -> Iterator[dict[str, Any]]:
        count = self.sizes.adapters
        for name, room in (("roomy", count + 1), ("tight", max(2, count // ROOM_SHARE))):
            memory = f", adapter_memory: {room * self._bytes * 11 // 10}, host_memory: {2 * count * self._bytes}"
            begin = time.monotonic()
            with HttpService(
                self._model, self._paths, self._root / name, "bfloat16", 0, memory, device=self._device
            ) as service:
                yield {"service": name, "load": "start", "seconds": time.monotonic() - begin}
                for row in asyncio.run(self._called(service, tight=name == "tight")):
                    yield {"service": name, **row}

    async def _called(self, service: HttpService, *, tight: bool) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        async with open_session(service.key) as session, operator(service):
            call = Caller(session, service.url, [], max_tokens=2)
            first = await self._each(call, self.functions, self.sizes.lengths[0])
            rows.append({"load": "first calls", "words": self.sizes.lengths[0], **_ttft_columns(first)})
            begin = time.monotonic()
            try:
                async with asyncio.timeout(self.sizes.measuring_s):
                    await until_measured(service)
            except TimeoutError:
                pass  # the row says so
            rows.append({"load": "measuring", "seconds": time.monotonic() - begin})
            for words in self.sizes.lengths:
                names = self.functions if tight else self.functions[:1]
                models = [names[i % len(names)] for i in range(self.sizes.calls)]
                rows.append(
                    {"load": "one by one", "words": words, **_ttft_columns(await self._each(call, models, words))}
                )
            loaded = Caller(session, service.url, [], max_tokens=self.sizes.load_tokens)
            for load, models in (("base", [service.base]), ("adapters", self.functions)):
                planned = plan(models, self.sizes.requests, self.sizes.load_prompt, self.seed)
                samples = await closed_loop(loaded, planned, self.sizes.callers)
                answers = [sample for sample in samples if isinstance(sample, Answer)]
                rows.append({"load": load, "states": _states(answers), **summary(answers)})
        return rows

    async def _each(self, call: Caller, models: Sequence[str], words: int) -> list[Answer]:
        answers = []
        for planned in plan(models, len(models), words, self.seed + words):
            answer = await call(planned)
            check([answer])
            answers.append(answer)
        return answers


def _ttft_columns(answers: Sequence[Answer]) -> dict[str, Any]:
    return {"ttft_ms": [round(each.ttft * 1e3, 1) for each in answers], "states": _states(answers)}


def _states(answers: Sequence[Answer]) -> dict[str, int]:
    states = [each.state for each in answers]
    return {state: states.count(state) for state in dict.fromkeys(states)}


def figures_of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Medians in ms by words; the first of a length is not counted. `cold_over_warm`: tight over roomy."""
    figures: dict[str, float] = {}
    for row in rows:
        name = row["service"]
        if row["load"] == "start":
            figures[f"start_s_{name}"] = row["seconds"]
        elif row["load"] == "first calls":
            figures[f"first_ttft_ms_{name}"] = median(row["ttft_ms"][1:])
        elif row["load"] == "one by one":
            figures[f"ttft_ms_{name}_w{row['words']}"] = median(row["ttft_ms"][1:])
            warm = figures.get(f"ttft_ms_roomy_w{row['words']}")
            if name == "tight" and warm:
                figures[f"cold_over_warm_w{row['words']}"] = median(row["ttft_ms"][1:]) / warm
        elif "tok_s" in row:
            figures |= {f"{kind}_{name}_{row['load']}": row[kind] for kind in ("tok_s", "ttft_p50_ms", "tpot_p50_ms")}
    return figures


def study(
    root: Path, shape: str, device: str, tokenizer: Path, sizes: Sizes, seed: int, file: Path | None = None
) -> dict[str, Any]:
    """Every row is in the file as soon as it is there."""
    bench = Bench(root, shape, device, tokenizer, sizes, seed)
    settings = {"shape": shape, "device": device, "dtype": "bfloat16", "rank": RANK, **vars(sizes)}
    rows: list[dict[str, Any]] = []
    for row in bench.rows():
        rows.append(row)
        save(report("gpu_service", settings, seed, rows, figures_of(rows)), file)
    return report("gpu_service", settings, seed, rows, figures_of(rows))


def main() -> None:
    parser = arguments(__doc__ or "", SMOLLM2)
    parser.add_argument("--shape", choices=("7b", "1b"), default="7b")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no GPU is here: benchmarks.serve.serve measures a service on a CPU")
    sizes = QUICK if options.quick else Sizes()
    with tempfile.TemporaryDirectory() as root:
        document = study(Path(root), options.shape, "cuda", options.model, sizes, options.seed, options.json)
        publish(document, options.json)


if __name__ == "__main__":
    main()
