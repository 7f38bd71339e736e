"""Serving, over HTTP: the whole service through the load generator, its gateway against its node, and a peer server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common.http_service import HttpService
from benchmarks.common.latency import Sample, summary
from benchmarks.common.load import Call, OpenAiServer, closed_loop, open_loop, open_session, plan, poisson
from benchmarks.common.rule import ratio_figures
from benchmarks.engine.in_process import RANKS
from benchmarks.serve.node_call import NodeServer, find_node

CONCURRENCY = len(RANKS)
SHORT = (8, 4)
"""Prompt and output tokens of the requests that compare gateway and node: a short prefill varies by little."""
OPEN_SHARE = 0.7
"""Load of the open loop, as a share of the closed loop's requests/s: below saturation, with a queue now and then."""


@dataclass(frozen=True)
class Server:
    """`models`: the base, then one name per adapter."""

    url: str
    key: str | None
    models: tuple[str, ...]


@dataclass(frozen=True)
class Loads:
    rounds: int
    requests: int
    pairs: int
    prompt_tokens: int
    output_tokens: int
    seed: int


def measure(
    service: HttpService, model_dir: Path, peer: Server | None, loads: Loads
) -> tuple[list[Any], dict[str, float]]:
    """Rows and figures."""
    ours = Server(service.url, service.key, (service.base, *(f"a{i}" for i in range(len(RANKS)))))
    return asyncio.run(_measure(service, model_dir, {"http": ours} | ({"peer": peer} if peer else {}), loads))


async def _measure(
    service: HttpService, model_dir: Path, servers: dict[str, Server], loads: Loads
) -> tuple[list[Any], dict[str, float]]:
    rows = await closed_rounds(servers, loads)
    figures = {f"http_{kind}_tok_s": _middle(rows, "http", kind, "tok_s") for kind in ("base", "mixed")}
    if "peer" in servers:
        figures |= over_peer(rows)
    rate = OPEN_SHARE * _middle(rows, "http", "mixed", "requests_s")
    opened = await _open(servers["http"], loads, rate)
    figures |= {f"open_{name}": value for name, value in opened.items() if name.endswith("_ms")} | {"open_rate": rate}
    rows.append({"server": "http", "load": "open mixed", **_rounded(opened)})
    added = await _gateway_added(service, model_dir, loads)
    rows += added
    gateway, node = ({r["call"]: r for r in added}[name] for name in ("gateway", "node"))
    figures["gateway_added_p50_ms"] = gateway["ttft_p50_ms"] - node["ttft_p50_ms"]
    figures["gateway_added_gap_p50_ms"] = gateway["gap_p50_ms"] - node["gap_p50_ms"]
    return rows, figures


async def closed_rounds(servers: dict[str, Server], loads: Loads) -> list[Any]:
    """The servers in turn, each with the base alone and with its adapters; all are called once before."""
    rows: list[Any] = []
    for index in range(-1, loads.rounds):  # round -1 warms up
        for name, server in servers.items():
            async with open_session(server.key) as session:
                call = OpenAiServer(session, server.url, loads.output_tokens)
                for kind, models in (("base", server.models[:1]), ("mixed", server.models[1:])):
                    count = CONCURRENCY if index < 0 else loads.requests
                    planned = plan(models, count, loads.prompt_tokens, loads.seed + index)
                    samples = await closed_loop(call, planned, CONCURRENCY)
                    if index >= 0:
                        found = _rounded(summary(complete(samples, loads.output_tokens)))
                        rows.append({"server": name, "load": kind, "round": index, **found})
    return rows


async def _open(server: Server, loads: Loads, rate: float) -> dict[str, float]:
    planned = plan(server.models[1:], loads.requests, loads.prompt_tokens, loads.seed)
    async with open_session(server.key) as session:
        call = OpenAiServer(session, server.url, loads.output_tokens)
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
    return [{"call": name, **_rounded(summary(complete(found, count)))} for name, found in samples.items()]


def complete(samples: Sequence[Sample], output_tokens: int) -> Sequence[Sample]:
    """The samples. Raises RuntimeError unless every request got all its tokens: other work is not comparable."""
    for sample in samples:
        if sample.error or sample.output_tokens != output_tokens:
            raise RuntimeError(
                f"a request of {sample.model} got {sample.output_tokens} of {output_tokens} tokens"
                f"{': ' + sample.error if sample.error else ''}"
            )
    return samples


def over_peer(rows: list[Any]) -> dict[str, float]:
    """Tokens/s of the whole service over the peer's, both over HTTP: medians of the rounds' ratios."""
    figures: dict[str, float] = {}
    for kind, name in (("mixed", "over_vllm"), ("base", "over_vllm_base")):
        ours, theirs = (_values(rows, server, kind, "tok_s") for server in ("http", "peer"))
        figures |= ratio_figures(name, ours, theirs, lower_is_better=False) | {f"peer_{kind}_tok_s": median(theirs)}
    return figures


def _values(rows: list[Any], server: str, load: str, unit: str) -> list[float]:
    return [row[unit] for row in rows if row.get("server") == server and row["load"] == load]


def _middle(rows: list[Any], server: str, load: str, unit: str) -> float:
    return median(_values(rows, server, load, unit))


def _rounded(found: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in found.items()}
