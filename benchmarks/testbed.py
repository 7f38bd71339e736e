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
from benchmarks.gateway_rig import GATEWAY, process, wait_until_ready
from benchmarks.latency import Sample
from benchmarks.load import recorded
from benchmarks.model_node import ModelNodeConfig
from cluster.secret import create_secret
from garnish.simulation.job import TraceRequest
from garnish.simulation.profile import NodeProfile
from gateway.config import GatewayConfig
from tests.support.ports import free_port

NODES = 8
"""Each a process of its own; they share the cores of one machine, and a node is a few events each step."""
TENANT = "bench"
LAYER = "base_model.model.model.layers.0.self_attn.q_proj"
ADAPTER = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "target_modules": ["q_proj"], "layers_to_transform": [0],
    "bias": "none",
}  # fmt: skip
MAX_TOKENS = 256
RECORDS_SECONDS = 1.0
"""Within which every node has told the gateway of itself."""


@dataclass(frozen=True)
class Bed:
    url: str
    key: str
    max_tokens: int
    """that every call asks for, unless its answer is longer"""


def registry_of(model_dir: Path, functions: dict[str, int], tpot: float, root: Path) -> tuple[Path, str]:
    """A registry with one tiny adapter for each function, of its rank; and the key of its tenant, who is promised
    `tpot` seconds between two tokens."""
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
    secret = create_secret(root / "secret")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    config = GatewayConfig(
        model_dir=str(model_dir), base_id=base.id, registry=str(registry), secret_file=str(root / "secret"),
        tmp_dir=str(root / "uploads"), port=port, shutdown_seconds=1.0, policy=policy,
    )  # fmt: skip
    with ExitStack() as stack:
        log = root / "gateway.log"
        gateway = stack.enter_context(process(["-c", GATEWAY], msgspec.json.encode(config), log))
        nodes = []
        for number in range(count):
            told = ModelNodeConfig(
                url, secret, base.fingerprint, base.id, base.max_context, profile, f"node-{number}"
            )  # fmt: skip
            line = msgspec.json.encode(told) + b"\n"
            nodes.append(
                stack.enter_context(process(["-m", "benchmarks.model_node"], line, root / f"node-{number}.log"))
            )
        for node in nodes:
            assert node.stdout is not None
            node.stdout.readline()
        wait_until_ready(url, gateway, log)
        time.sleep(RECORDS_SECONDS)
        yield Bed(url, key, MAX_TOKENS)


async def play(found: Bed, requests: Sequence[TraceRequest], words_per_token: float, stream: bool) -> list[Sample]:
    """Each request at its time; what became of them, in order. `late` tells how well the client kept to its times.

    Without `stream` the first token's time is the gateway's, and a token costs neither of them any work."""
    begin = asyncio.get_running_loop().time() + 0.5
    headers = {"authorization": f"Bearer {found.key}"}
    limits = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(
        headers=headers, timeout=limits, connector=aiohttp.TCPConnector(limit=0)
    ) as session:
        calls = []
        for request in requests:
            await asyncio.sleep(begin + request.at - asyncio.get_running_loop().time())
            words = max(1, round(request.prompt_tokens * words_per_token))
            body = {
                "prompt": "the " * words, "max_tokens": max(found.max_tokens, request.output_tokens),
                "seed": request.output_tokens, "ignore_eos": True, "stream": stream,
            }  # fmt: skip
            url = f"{found.url}/invoke/{request.function}"
            calls.append(asyncio.create_task(_call(session, url, body, begin + request.at)))
        return await asyncio.gather(*calls)


async def _call(session: aiohttp.ClientSession, url: str, body: dict[str, Any], due: float) -> Sample:
    clock = asyncio.get_running_loop().time
    sample = Sample(url.rpartition("/")[2], due=due, sent=clock())
    async with recorded(sample), session.post(url, json=body) as reply:
        if reply.status != 200:
            sample.error = str(reply.status)
        elif body["stream"]:
            sample.error = await _read_stream(reply.content, sample)
        else:
            told = await reply.json()
            sample.times.append(sample.sent + told["timing"]["ttft_ms"] / 1e3)
            _note_usage(told, sample)
    sample.end = clock()
    return sample


def _note_usage(told: dict[str, Any], sample: Sample) -> None:
    usage = told.get("usage", {})
    sample.output_tokens, sample.prompt_tokens = usage.get("completion_tokens", 0), usage.get("prompt_tokens", 0)


async def _read_stream(stream: aiohttp.StreamReader, sample: Sample) -> str:
    """The error, or nothing."""
    kind, clock = b"", asyncio.get_running_loop().time
    async for line in stream:
        if line.startswith(b"event: "):
            kind = line[7:].strip()
        elif line.startswith(b"data: ") and kind == b"token":
            sample.times.append(clock())
        elif line.startswith(b"data: "):
            _note_usage(json.loads(line[6:]), sample)
            return "" if kind == b"done" else "error event"
    return "cut off"
