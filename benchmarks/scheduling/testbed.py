"""TESTBED-8: model-timed nodes behind the real gateway, and a client that calls it in an open loop over HTTP."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import torch
from safetensors.torch import save_file

from adapters.base_model import load_base_model
from adapters.deployment import AdapterUpload
from adapters.local_store import LocalStore
from adapters.registry import Registry
from adapters.slo import Slo
from adapters.tenants import Tenants
from benchmarks.common.gateway_process import gateway_process
from benchmarks.common.latency import Sample
from benchmarks.common.load import read_events, recorded
from benchmarks.common.processes import process
from benchmarks.scheduling.model_node import ModelNodeConfig
from garnish.simulation.job import TraceRequest
from garnish.simulation.profile import NodeProfile

NODES = 8
"""Nodes, each a separate process. They share one machine's cores: a node is a few events each step."""
TENANT = "bench"
LAYER = "base_model.model.model.layers.0.self_attn.q_proj"
ADAPTER = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "target_modules": ["q_proj"], "layers_to_transform": [0],
    "bias": "none",
}  # fmt: skip
MAX_TOKENS = 256
RECORDS_SECONDS = 1.0
"""Time within which every node has published its record."""


@dataclass(frozen=True)
class Bed:
    url: str
    key: str
    max_tokens: int
    """tokens that every call asks for, unless its answer is longer"""


def registry_of(model_dir: Path, functions: dict[str, int], tpot: float, root: Path) -> tuple[Path, str]:
    """Writes a registry with one tiny adapter for each function, of its rank. Returns its folder, and its tenant's key.

    The tenant's SLO is a TPOT of `tpot` seconds.
    """
    store = LocalStore(root / "registry")
    tenants, registry = Tenants(store), Registry(store, load_base_model(model_dir, model_dir.name))
    tenants.put(TENANT, slo=Slo(tpot_ms=tpot * 1e3))
    width = json.loads((model_dir / "config.json").read_text())["hidden_size"]
    for number, (name, rank) in enumerate(functions.items()):
        file = root / f"rank-{rank}.safetensors"
        if not file.exists():
            save_file(
                {f"{LAYER}.lora_A.weight": torch.ones(rank, width), f"{LAYER}.lora_B.weight": torch.ones(width, rank)},
                file,
            )
        config = {**ADAPTER, "r": rank, "lora_alpha": 1 + number}  # another alpha makes another adapter
        registry.deploy(TENANT, name, AdapterUpload(json.dumps(config).encode(), file))
    return root / "registry", tenants.add_key(TENANT)[0]


@contextmanager
def bed(
    model_dir: Path, registry: Path, key: str, profile: NodeProfile, policy: str, root: Path, count: int = NODES
) -> Iterator[Bed]:
    """A gateway with the policy, and `count` node processes."""
    base = load_base_model(model_dir, model_dir.name)
    root.mkdir(parents=True)
    with ExitStack() as stack:
        gateway = stack.enter_context(gateway_process(model_dir, str(registry), root, policy=policy))
        nodes = []
        for number in range(count):
            node_config = ModelNodeConfig(
                gateway.url, gateway.secret, base.fingerprint, base.id, base.max_context, profile, f"node-{number}"
            )  # fmt: skip
            line, log = msgspec.json.encode(node_config) + b"\n", root / f"node-{number}.log"
            nodes.append(stack.enter_context(process(["-m", "benchmarks.scheduling.model_node"], line, log)))
        for node in nodes:
            assert node.stdout is not None
            node.stdout.readline()
        gateway.wait_until_ready()
        time.sleep(RECORDS_SECONDS)
        yield Bed(gateway.url, key, MAX_TOKENS)


async def play(testbed: Bed, requests: Sequence[TraceRequest], words_per_token: float, stream: bool) -> list[Sample]:
    """Sends each request at its time. Returns the samples in order; `late` shows how well the client kept to the times.

    Without `stream` the first token's time is the gateway's, and a token costs neither of them any work."""
    begin = asyncio.get_running_loop().time() + 0.5
    headers = {"authorization": f"Bearer {testbed.key}"}
    limits = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(
        headers=headers, timeout=limits, connector=aiohttp.TCPConnector(limit=0)
    ) as session:
        calls = []
        for request in requests:
            await asyncio.sleep(begin + request.at - asyncio.get_running_loop().time())
            words = max(1, round(request.prompt_tokens * words_per_token))
            body = {
                "prompt": "the " * words, "max_tokens": max(testbed.max_tokens, request.output_tokens),
                "seed": request.output_tokens, "ignore_eos": True, "stream": stream,
            }  # fmt: skip
            url = f"{testbed.url}/invoke/{request.function}"
            calls.append(asyncio.create_task(_call(session, url, body, begin + request.at)))
        return await asyncio.gather(*calls)


async def _call(session: aiohttp.ClientSession, url: str, body: dict[str, Any], scheduled_at: float) -> Sample:
    clock = asyncio.get_running_loop().time
    sample = Sample(url.rpartition("/")[2], scheduled_at=scheduled_at, sent=clock())
    async with recorded(sample), session.post(url, json=body) as reply:
        if reply.status != 200:
            sample.error = str(reply.status)
        elif body["stream"]:
            sample.error = await _read_stream(reply.content, sample)
        else:
            body_of_reply = await reply.json()
            sample.times.append(sample.sent + body_of_reply["timing"]["ttft_ms"] / 1e3)
            _record_usage(body_of_reply, sample)
    sample.end = clock()
    return sample


def _record_usage(reply: dict[str, Any], sample: Sample) -> None:
    usage = reply.get("usage", {})
    sample.output_tokens, sample.prompt_tokens = usage.get("completion_tokens", 0), usage.get("prompt_tokens", 0)


async def _read_stream(stream: aiohttp.StreamReader, sample: Sample) -> str:
    """The error, or nothing."""
    async for kind, data in read_events(stream):
        if kind == "token":
            sample.times.append(asyncio.get_running_loop().time())
        else:
            _record_usage(json.loads(data), sample)
            return "" if kind == "done" else "error event"
    return "cut off"
