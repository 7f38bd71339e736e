"""When each layer of one cold request came and was computed: records it while the engine serves the request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from benchmarks.cold_rig import Rig
from node_agent.types import LayerState

Span = tuple[float, float]


class Recorder:
    """`changed` is to be told by the engine's loads; `of` records one adapter's request, which runs alone."""

    def __init__(self) -> None:
        self._watched: Any = None
        self.in_host: dict[int, float] = {}
        self.on_device: dict[int, float] = {}
        self._computed: dict[int, Span] = {}
        self._by_workers: dict[int, Span] = {}

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
        """A layer's time on the workers: from its first handoff's opening until the engine has its last answer."""
        opened: Callable[..., Any] = workers.open
        spans = self._by_workers

        def note(x: torch.Tensor, slot: int, layer: int, *rest: Any) -> Any:
            begin = spans.get(layer, (time.perf_counter(), 0.0))[0]
            handoff = opened(x, slot, layer, *rest)
            if handoff is not None:
                wait = handoff.wait

                def waited(*args: Any) -> Any:
                    arrived = wait(*args)
                    spans[layer] = begin, time.perf_counter()
                    return arrived

                handoff.wait = waited
            return handoff

        workers.open = note
        try:
            yield
        finally:
            del workers.open

    def layers(self, origin: float) -> list[dict[str, Any]]:
        """By layer, seconds from `origin`. A load begins when the one before it on the link has ended."""
        found: list[dict[str, Any]] = []
        order = sorted(self.on_device, key=lambda layer: self.on_device[layer])
        begins = dict(zip(order, [origin, *(self.on_device[layer] for layer in order)], strict=False))
        for layer, (begin, end) in sorted(self._computed.items()):
            one: dict[str, Any] = {"device": [begin - origin, end - origin]}
            if layer in self.on_device:
                one["load"] = [max(0.0, begins[layer] - origin), self.on_device[layer] - origin]
            if layer in self._by_workers:
                one["cpu"] = [at - origin for at in self._by_workers[layer]]
            found.append({"layer": layer} | {name: [round(at, 6) for at in span] for name, span in one.items()})
        return found


class _Hooks:
    """Notes when a layer was first computed."""

    def __init__(self, layer: torch.nn.Module, index: int, spans: dict[int, Span]) -> None:
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
        self.spans.setdefault(self.index, (self.begin, time.perf_counter()))
