"""`garnish profile`: measures the durations of passes and cold starts on this host."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from garnish.cli.options import DEFAULT_FILE, DEFAULT_STATE, File, HostNodes, Output, State
from garnish.errors import FrontDoorError
from garnish.screen import Screen

if TYPE_CHECKING:
    from node_agent.config import EngineConfig

ROOT = Path(__file__).parents[2]
MAX_SILENCE_SECONDS = 1800.0
"""Seconds without a message after which the measurement is considered stuck.

A large base model on few cores is slow.
"""


def profile(
    output: Output,
    file: File = DEFAULT_FILE,
    state: State = DEFAULT_STATE,
    node_id: Annotated[str, typer.Option("--node-id", help="The node whose profile it becomes.")] = "node-1",
    host_nodes: HostNodes = None,
) -> None:
    """Measure this host for the scheduler and the cold-start planner, while it serves nothing. Takes minutes.

    A node without a profile makes a short measurement at its start, if that takes only seconds. Set --host-nodes to the
    number of nodes that `garnish up --nodes` will start. A node of a local pool needs no --host-nodes: its share
    follows from the pools.
    """
    from garnish.config import load_service_file
    from garnish.node_pools import host_nodes_of
    from garnish.settings import node_config, resolve_base

    service = load_service_file(file)
    config = node_config(
        service,
        resolve_base(service),
        state.absolute(),
        node_id=node_id,
        gateway_url="http://127.0.0.1",
        host_nodes=host_nodes or host_nodes_of(service, node_id),
    ).engine
    with output.screen() as screen:
        measured = _measure(config, screen)
        screen.end_progress()
        screen.result(measured)
        show(measured, Path(config.profile or ""), screen)


def _measure(config: EngineConfig, screen: Screen) -> dict[str, Any]:
    """Measures with the GPU and the cores that a node would have, and returns the result.

    Raises FrontDoorError.
    """
    from node_agent.gpu.claim import claimed_gpus
    from node_agent.gpu.devices import NoGpu

    try:
        with claimed_gpus(config) as claimed:
            return run_measurement(claimed, screen.progress)
    except NoGpu as error:
        raise FrontDoorError(f"the node can't be measured: {error}") from None


def run_measurement(
    config: EngineConfig,
    step: Callable[[str, float | None], None],
    command: Sequence[str] = (),
    patience: float = MAX_SILENCE_SECONDS,
) -> dict[str, Any]:
    """Measures the node in a child process, and returns its cold-start profile and its performance model.

    The keys are `cold_start` (None for a node with vLLM) and `performance`. The child also writes them to files:
    `config.profile`, and a file next to it. `step` is called with a text about the current step and the completed share
    (0 to 1). `command`: the child's; empty: that of the node's engine. The child ends when this call or this process
    ends. Raises FrontDoorError, also after `patience` seconds without a message.
    """
    from garnish.child_messages import child_messages
    from node_agent.config import ProfileProcessConfig

    settings = ProfileProcessConfig(parent=os.getpid(), engine=config)
    python = config.vllm.python if config.engine == "vllm" else ""
    variables = {"PYTHONPATH": str(ROOT)} if python else {}  # that environment does not have our packages
    module = "node_agent.vllm.profile_process" if config.engine == "vllm" else "node_agent.profile_process"
    child = child_messages(
        command or (python or sys.executable, "-m", module),
        settings,
        doing="the measurement",
        patience=patience,
        variables=variables,
    )
    with contextlib.closing(child) as messages:
        for message in messages:
            if message.get("type") == "step":
                step(message["text"], message.get("share"))
            elif message.get("type") == "failed":
                raise FrontDoorError(f"the node can't be measured: {message['message']}")
            else:
                message.pop("type", None)
                return dict(message)
    raise FrontDoorError("the measuring process ended too early; its log is above")


def show(measured: dict[str, Any], file: Path, screen: Any) -> None:
    cold_start, model = measured["cold_start"], measured["performance"]
    if cold_start is not None:
        _show_cold_start(cold_start, screen, model.get("expected_link"))
    _show_performance(model, screen)
    performance = file.with_suffix(".performance.json")
    screen.line(f"written to {performance}" if cold_start is None else f"written to {file} and {performance.name}")


def _show_cold_start(profile: dict[str, Any], screen: Any, expected: float | None) -> None:
    layer = ", ".join(f"{tokens}: {seconds * 1e3:.2f} ms" for tokens, seconds in profile["layer"])
    screen.line(f"a layer on the device, by prompt tokens: {layer}")
    link = profile["link"]
    of = f" of the {expected / 1e9:.2f} GB/s of its PCIe link" if expected else ""
    screen.line(
        f"host memory to device: {link['bandwidth'] / 1e9:.2f} GB/s{of}, latency {link['latency'] * 1e6:.0f} us"
    )
    cpu = profile["cpu"]
    if cpu is None:
        screen.line("no CPU workers")
    else:
        rate = 1e-9 / cpu["per_product"] if cpu["per_product"] else float("inf")
        screen.line(f"a CPU worker: {cpu['fixed'] * 1e6:.0f} us a handoff, {rate:.1f} billion multiplications a second")


def _show_performance(model: dict[str, Any], screen: Any) -> None:
    decode, prefill = model["decode"]["model"], model["prefill"]["model"]
    terms = {
        "max_rank": "rows x largest rank",
        "request_ranks": "ranks of requests",
        "adapter_ranks": "ranks of adapters",
    }
    term = terms[decode["rank_term"]] + _padded(decode)
    screen.line(
        f"a decode step: {decode['base'] * 1e3:.2f} ms + {decode['per_row'] * 1e6:.1f} us a row{_beyond(decode)} "
        f"+ {decode['per_context'] * 1e9:.1f} ns a token of context "
        f"+ {decode['per_rank'] * 1e6:.2f} us of the {term}{_quality(model['decode'])}"
    )
    screen.line(
        f"a pass over prompts: {prefill['base'] * 1e3:.2f} ms + {prefill['per_token'] * 1e6:.1f} us a token "
        f"+ {prefill['per_token2'] * 1e9:.2f} ns a token squared "
        f"+ {prefill['per_token_rank'] * 1e9:.1f} ns a token and rank{_padded(prefill)}{_quality(model['prefill'])}"
    )
    forms = ", ".join(f"{form['r2']:.3f} ({form['kernel']})" for form in model["paper"])
    if forms:
        screen.line(f"a decode step by the rank term alone, batches of 4 to 32: R^2 {forms}")


def _beyond(decode: dict[str, Any]) -> str:
    flat = decode.get("flat_rows", 0)
    return f" from row {flat + 1} on" if flat else ""


def _padded(model: dict[str, Any]) -> str:
    rank = model.get("padded_rank", 0)
    return f", each adapter counted as rank {rank}" if rank else ""


def _quality(fit: dict[str, Any]) -> str:
    quality = fit["quality"]
    return (
        f" (R^2 {quality['r2']:.3f}, held-out error {quality['heldout_median_error']:.1%}, "
        f"{quality['samples']} configurations, {quality['set_aside']} set aside)"
    )
