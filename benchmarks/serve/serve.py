"""Serving: this script's own client against any OpenAI-compatible URL, or, without a URL, the serving study.

    python -m benchmarks.serve.serve --url URL --models a,b --key-file KEY --rate 4 --requests 200
    python -m benchmarks.serve.serve --json benchmarks/results/serve.json

The study runs eight requests at once in process, on a small real model and on a random 12-layer one: the base, eight
adapters of ranks 8 to 128, and the same adapters padded to rank 128, in the engine and (but for the padded ones) in
transformers and PEFT with equal threads. Then it starts the whole service and calls it over HTTP.
"""

from __future__ import annotations

import argparse
import asyncio
import math
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.common.http_service import HttpService
from benchmarks.common.latency import Sample, summary
from benchmarks.common.load import TIMEOUT, OpenAiServer, check_url, closed_loop, open_loop, open_session, plan, poisson
from benchmarks.common.report import ROOT, ContentionProbe, arguments, publish, report, run_study
from benchmarks.engine.in_process import RANKS
from benchmarks.serve.batches import Batches, Shape, figures_of
from benchmarks.serve.over_http import CONCURRENCY, OPEN_SHARE, SHORT, Loads, measure
from node_agent.cores import usable_cores


async def drive(options: argparse.Namespace) -> tuple[list[Sample], int]:
    """Returns the samples, and the number of failures among the warming calls, one to each model."""
    models = options.models.split(",")
    planned = plan(models, options.requests, options.prompt_tokens, options.seed)
    async with open_session(_key(options.key_file), options.timeout) as session:
        call = OpenAiServer(session, options.url, options.output_tokens)
        warm = await closed_loop(call, plan(models, len(models), options.prompt_tokens, options.seed + 1), 1)
        if options.rate:
            samples = await open_loop(call, planned, poisson(options.rate, len(planned), options.seed))
        else:
            samples = await closed_loop(call, planned, options.concurrency)
    return samples, sum(bool(sample.error) for sample in warm)


def load(options: argparse.Namespace) -> dict[str, Any]:
    """Requests to a URL. Each model is called once before; those calls are in no figure but `warm_up_failed`."""
    samples, failed = asyncio.run(drive(options))
    begin = min(sample.sent for sample in samples)
    rows = [
        {
            "model": sample.model, "error": sample.error, "sent_ms": _ms(sample.sent - begin),
            "late_ms": _ms(sample.late), "times_ms": [_ms(at - sample.sent) for at in sample.times],
            "e2e_ms": _ms(sample.e2e), "prompt_tokens": sample.prompt_tokens, "output_tokens": sample.output_tokens,
        }
        for sample in samples
    ]  # fmt: skip
    names = ("url", "models", "rate", "concurrency", "requests", "prompt_tokens", "output_tokens", "timeout")
    settings = {name: getattr(options, name) for name in names}
    return report("serve_load", settings, options.seed, rows, summary(samples) | {"warm_up_failed": failed})


def study(options: argparse.Namespace, root: Path) -> dict[str, Any]:
    threads = options.threads or usable_cores()
    torch.set_num_threads(threads)
    prompt_tokens, output_tokens = (16, 4) if options.quick else (128, 64)
    rounds, layers, width = (1, 2, 192) if options.quick else (options.rounds, 12, 768)
    shape = Shape(torch.bfloat16, threads, rounds, prompt_tokens, output_tokens, options.seed)
    loads = Loads(*((1, 8, 4) if options.quick else (3, 24, 80)), prompt_tokens, output_tokens, options.seed)
    real = Path(options.base).absolute()
    models = {"smollm2": real, "llama12": make_random_llama(root / "llama12", layers, options.seed, width)}
    figures, probe = dict[str, float](), ContentionProbe()
    rows: list[dict[str, Any]] = []
    for name, model_dir in models.items():
        batches = Batches(model_dir, root / name, shape)
        rows_of_model = batches.measure()
        batches.close()
        rows += [{"model": name, **row} for row in rows_of_model]
        figures |= {
            f"{figure}_{name}": value for figure, value in figures_of(rows_of_model, batches.adapter_bytes).items()
        }
    adapters = [root / "smollm2" / f"a{i}" for i in range(len(RANKS))]
    with HttpService(real, adapters, root / "service", "bfloat16", threads) as service:
        served, http = asyncio.run(measure(service, real, loads))
    figures |= {**http, **probe.values()}
    settings = {
        "models": {"smollm2": real.name, "llama12": f"random Llama, {layers} layers, {width} wide"},
        "dtype": "bfloat16",
        "threads": threads, "rounds": rounds, "prompt_tokens": prompt_tokens, "output_tokens": output_tokens,
        "ranks": RANKS, "targets": "q,k,v", "concurrency": CONCURRENCY, "http_rounds": loads.rounds,
        "http_requests": loads.requests, "pairs": loads.pairs, "short": SHORT, "open_share": OPEN_SHARE,
        "quick": options.quick, "peer_dtype": "its faster one for each batch",
    }  # fmt: skip
    return report("serve", settings, options.seed, rows + served, figures)


def _key(file: Path | None) -> str | None:
    return None if file is None else file.read_text().strip()


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 2)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = arguments(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    one = parser.add_argument_group("load on a URL")
    one.add_argument("--url", type=check_url, help="base of an OpenAI-compatible server, without /v1/completions")
    one.add_argument("--models", help="names to call in turn, with commas between")
    one.add_argument("--key-file", type=Path, metavar="FILE", help="holds the API key")
    loop = one.add_mutually_exclusive_group()
    loop.add_argument("--rate", type=_positive, metavar="R", help="open loop: Poisson arrivals, R requests per second")
    loop.add_argument("--concurrency", type=_count, metavar="N", help="closed loop: N requests at once (default: 8)")
    one.add_argument("--requests", type=_count, default=100, metavar="N")
    one.add_argument("--prompt-tokens", type=_count, default=128, metavar="N", help="words of the drawn prompts")
    one.add_argument("--output-tokens", type=_count, default=64, metavar="N")
    one.add_argument("--timeout", type=_positive, default=TIMEOUT, metavar="S", help="seconds for one whole request")
    study_options = parser.add_argument_group("the study, without --url")
    study_options.add_argument("--base", default=ROOT / "models" / "SmolLM2-135M-Instruct", type=Path, metavar="DIR")
    study_options.add_argument("--threads", type=_count)
    study_options.add_argument("--rounds", type=_count, default=5)
    options = parser.parse_args(argv)
    if options.url and not options.models:
        parser.error("--url needs --models: the names to call")
    if options.rate is None and options.concurrency is None:
        options.concurrency = CONCURRENCY
    return options


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return value


def main() -> None:
    options = parse()
    if options.url:
        publish(load(options), options.json)
        return
    run_study(study, options)


if __name__ == "__main__":
    main()


def make_random_llama(target: Path, layers: int = 12, seed: int = 0, width: int = 768) -> Path:
    """Write a Llama with 12 heads and GPT-2's vocabulary, tied, in bf16; there is no tokenizer."""
    config = LlamaConfig(
        vocab_size=50_257,
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=12,
        max_position_embeddings=2_048,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(target)
    return target
