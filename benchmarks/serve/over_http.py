"""Serving, over HTTP: the whole service through the load generator, and its gateway against its node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common.http_service import HttpService
from benchmarks.common.latency import Sample, summary
from benchmarks.common.load import Call, OpenAiServer, closed_loop, open_loop, open_session, plan, poisson
from benchmarks.engine.in_process import RANKS
from benchmarks.serve.node_call import NodeServer, find_node

CONCURRENCY = len(RANKS)
SHORT = (8, 4)
"""Prompt and output tokens of the requests that compare gateway and node: a short prefill varies by little."""
OPEN_SHARE = 0.7
"""Load of the open loop, as a share of the closed loop's requests/s: below saturation, with a queue now and then."""


@dataclass(frozen=True)
class Loads:
    rounds: int
    requests: int
    pairs: int
    prompt_tokens: int
    output_tokens: int
    seed: int


async def measure(service: HttpService, model_dir: Path, loads: Loads) -> tuple[list[Any], dict[str, float]]:
    """Returns rows and figures."""
    adapters = [f"a{i}" for i in range(len(RANKS))]
    rows = await closed_rounds(service, {"base": [service.base], "mixed": adapters}, loads)

    def middle(load: str, unit: str) -> float:
        return float(median(row[unit] for row in rows if row["load"] == load))

    figures = {f"http_{kind}_tok_s": middle(kind, "tok_s") for kind in ("base", "mixed")}
    rate = OPEN_SHARE * middle("mixed", "requests_s")
    opened = await _open(service, adapters, loads, rate)
    figures |= {f"open_{name}": value for name, value in opened.items() if name.endswith("_ms")} | {"open_rate": rate}
    rows.append({"load": "open mixed", **_rounded(opened)})
    added = await _gateway_added(service, model_dir, loads)
    rows += added
    gateway, node = ({r["call"]: r for r in added}[name] for name in ("gateway", "node"))
    figures["gateway_added_p50_ms"] = gateway["ttft_p50_ms"] - node["ttft_p50_ms"]
    figures["gateway_added_gap_p50_ms"] = gateway["gap_p50_ms"] - node["gap_p50_ms"]
    return rows, figures


async def closed_rounds(
    service: HttpService, models: Mapping[str, Sequence[str]], loads: Loads
) -> list[dict[str, Any]]:
    """Calls the models of each load in turn. Returns a row for each round and load."""
    rows: list[dict[str, Any]] = []
    async with open_session(service.key) as session:
        call = OpenAiServer(session, service.url, loads.output_tokens)
        for index in range(-1, loads.rounds):  # round -1 warms up
            for kind, names in models.items():
                count = CONCURRENCY if index < 0 else loads.requests
                planned = plan(names, count, loads.prompt_tokens, loads.seed + index)
                samples = await closed_loop(call, planned, CONCURRENCY)
                if index >= 0:
                    counted = _rounded(summary(complete(samples, loads.output_tokens)))
                    rows.append({"load": kind, "round": index, **counted})
    return rows


async def _open(service: HttpService, models: Sequence[str], loads: Loads, rate: float) -> dict[str, float]:
    planned = plan(models, loads.requests, loads.prompt_tokens, loads.seed)
    async with open_session(service.key) as session:
        call = OpenAiServer(session, service.url, loads.output_tokens)
        samples = await open_loop(call, planned, poisson(rate, len(planned), loads.seed))
    return summary(complete(samples, loads.output_tokens))


async def _gateway_added(service: HttpService, model_dir: Path, loads: Loads) -> list[Any]:
    """Short requests to the base, one at a time, through the gateway and straight to the node by turns."""
    prompt_tokens, count = SHORT
    url, base = await find_node(service)
    samples: dict[str, list[Sample]] = {"gateway": [], "node": []}
    async with open_session(service.key) as outer, open_session(service.secret) as inner:
        calls: dict[str, Call] = {
            "gateway": OpenAiServer(outer, service.url, count), "node": NodeServer(inner, url, base, model_dir, count)
        }  # fmt: skip
        for index, planned in enumerate(plan([service.base], loads.pairs + 1, prompt_tokens, loads.seed)):
            # Whoever is second may find something in a cache: each is second half of the time.
            for name in sorted(calls, reverse=bool(index % 2)):
                sample = await calls[name](planned)
                if index:  # the first pair opens the connections
                    samples[name].append(sample)
    return [{"call": name, **_rounded(summary(complete(of_call, count)))} for name, of_call in samples.items()]


def complete(samples: Sequence[Sample], output_tokens: int) -> Sequence[Sample]:
    """The samples. Raises RuntimeError unless every request got all its tokens: other work is not comparable."""
    for sample in samples:
        if sample.error or sample.output_tokens != output_tokens:
            raise RuntimeError(
                f"a request of {sample.model} got {sample.output_tokens} of {output_tokens} tokens"
                f"{': ' + sample.error if sample.error else ''}"
            )
    return samples


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in values.items()}
