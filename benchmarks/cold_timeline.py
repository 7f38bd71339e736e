"""One cold call, layer by layer: when each came and was computed, in its prompt's pass and in the decode steps that it
joined, with what the call's reply says of its cold start. `benchmarks.plots` draws docs/images/coldstart-request.svg.

A real engine serves the call alone, under the planner's choice; the link is simulated and workers are slowed, as in
coldstart.py.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.cold_bench import Bench
from benchmarks.cold_rig import Rig, draw_prompt
from benchmarks.report import ROOT, arguments, publish, report
from benchmarks.workloads import Call
from node_agent.coldstart.cold_starts import WAYS
from node_agent.types import LayerState

Span = tuple[float, float]
RANK, PROMPT, ANSWER, COLUMN = 64, 64, 6, "slowed"
"""Of the call that is shown: rank, tokens, and the CPU workers' speed."""


class Recorder:
    """`changed` is to be told by the engine's loads; `of` records one adapter's request, which runs alone."""

    def __init__(self) -> None:
        self._watched: Any = None
        self.in_host: dict[int, float] = {}
        self.on_device: dict[int, float] = {}
        self._computed: dict[int, list[Span]] = {}
        self._by_workers: dict[tuple[int, int], Span] = {}
        """by layer and pass"""

    def changed(self) -> None:
        """Called by whatever thread brought a layer on."""
        now = time.perf_counter()
        if self._watched is None:
            return
        store, digest = self._watched
        entry, host = store.device.get(digest), store.hosts.get(digest)
        here = host.here if host is not None else b""
        for layer in [i for i, there in enumerate(here) if there and i not in self.in_host]:
            self.in_host[layer] = now
        states = entry.copy.layers if entry is not None else ()
        for layer in [i for i, s in enumerate(states) if s == LayerState.DEVICE and i not in self.on_device]:
            self.on_device[layer] = now

    @contextmanager
    def of(self, rig: Rig, adapter: int) -> Iterator[None]:
        engine = rig.engine.engine
        runner: Any = engine.runner
        self.in_host, self.on_device, self._computed, self._by_workers = {}, {}, {}, {}
        self._watched = engine.store, rig.adapters[adapter].digest
        with ExitStack() as hooks:
            for index, layer in enumerate(runner.layers):
                hooks.enter_context(_Hooks(layer, index, self._computed))
            if engine.assist is not None:
                hooks.enter_context(self._handoffs(engine.assist.workers))
            try:
                yield
            finally:
                self._watched = None

    @contextmanager
    def _handoffs(self, workers: Any) -> Iterator[None]:
        """A layer's time on the workers, in one pass: from its first handoff's opening until the engine has its last
        answer."""
        opened: Callable[..., Any] = workers.open
        spans = self._by_workers

        def note(x: torch.Tensor, slot: int, layer: int, *rest: Any) -> Any:
            key = layer, len(self._computed.get(layer, ()))
            begin = spans.get(key, (time.perf_counter(), 0.0))[0]
            handoff = opened(x, slot, layer, *rest)
            if handoff is not None:
                wait = handoff.wait

                def waited(*args: Any) -> Any:
                    arrived = wait(*args)
                    spans[key] = begin, time.perf_counter()
                    return arrived

                handoff.wait = waited
            return handoff

        workers.open = note
        try:
            yield
        finally:
            del workers.open

    def layers(self, origin: float) -> list[dict[str, Any]]:
        """By layer, seconds from `origin`: its load, and by pass what the device and the workers did. A load begins
        when the one before it on the link has ended."""
        found: list[dict[str, Any]] = []
        order = sorted(self.on_device, key=lambda layer: self.on_device[layer])
        begins = dict(zip(order, [origin, *(self.on_device[layer] for layer in order)], strict=False))
        for layer, passes in sorted(self._computed.items()):
            one: dict[str, Any] = {"layer": layer, "device": [_since(origin, span) for span in passes]}
            if layer in self.on_device:
                one["load"] = _since(origin, (max(origin, begins[layer]), self.on_device[layer]))
            by_workers = [self._by_workers.get((layer, number)) for number in range(len(passes))]
            one["cpu"] = [span and _since(origin, span) for span in by_workers]
            found.append(one)
        return found


def _since(origin: float, span: Span) -> list[float]:
    return [round(at - origin, 6) for at in span]


class _Hooks:
    """Notes when a layer was computed."""

    def __init__(self, layer: torch.nn.Module, index: int, spans: dict[int, list[Span]]) -> None:
        self.layer, self.index, self.spans, self.begin = layer, index, spans, 0.0

    def __enter__(self) -> None:
        self._handles = [
            self.layer.register_forward_pre_hook(self._before),
            self.layer.register_forward_hook(self._after),
        ]

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, *_: object) -> None:
        self.begin = time.perf_counter()

    def _after(self, *_: object) -> None:
        self.spans.setdefault(self.index, []).append((self.begin, time.perf_counter()))


def cold_call(model: Path, root: Path, seed: int) -> dict[str, Any]:
    """What happened to one cold call, and when; seconds since it was sent."""
    recorder = Recorder()
    bench = Bench(model, root, seed, {RANK: 2}, recorder.changed)
    try:
        bench.set_cold(WAYS["auto"], COLUMN)
        warming, adapter = bench.of_rank[RANK]
        prompt = draw_prompt(bench.cold.engine, PROMPT)
        bench.cold.serve([Call(0.0, warming, PROMPT, ANSWER)], [prompt], 0.0)
        bench.cold.forget_device()
        with recorder.of(bench.cold, adapter):
            (served,) = bench.cold.serve([Call(0.0, adapter, PROMPT, ANSWER)], [prompt], 0.0).served
        sent = served.sample.sent
        return {
            "column": COLUMN, "rank": RANK, "prompt_tokens": PROMPT, "link_bytes_s": bench.link.bandwidth,
            "cold_start": msgspec.to_builtins(served.cold), "tokens_s": [at - sent for at in served.sample.times],
            "layers": recorder.layers(sent),
        }  # fmt: skip
    finally:
        bench.close()


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "SmolLM2-135M-Instruct")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:
        row = cold_call(options.model.absolute(), Path(root), options.seed)
    settings = {"model": options.model.name, "dtype": "bfloat16", "quick": options.quick}
    figures = {"ttft_ms": 1e3 * row["tokens_s"][0], "exposed_ms": 1e3 * row["cold_start"]["exposed"]}
    publish(report("cold_timeline", settings, options.seed, [row], figures, simulated=True), options.json)


if __name__ == "__main__":
    main()
