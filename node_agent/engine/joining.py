"""Requests that decode while their adapter is still loading: their rows join the hot pass.

The device computes the LoRA terms of layers that have arrived; CPU workers compute those of the others from host
memory. A row joins a pass only if it needs no byte that is still missing and lengthens the pass little. Otherwise it
sits the pass out.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from node_agent.coldstart.assist import Assist, AssistedPass
from node_agent.coldstart.cold_lora import ColdLora
from node_agent.coldstart.messages import PassMessages
from node_agent.engine.batch import build_lora
from node_agent.engine.cold import ColdPasses
from node_agent.engine.request import Request
from node_agent.engine.rows import Row
from node_agent.leases import Lease
from node_agent.runner.lora_choice import StartLora
from node_agent.sending_runner import batch_device
from node_agent.states import RequestState
from node_agent.types import ModelRunner, PassLora

log = logging.getLogger("garnish.engine")

IsLoaded = Callable[[Request], bool]


@dataclass(frozen=True)
class LoadingPart:
    """Tokens begin..end-1 of a pass. They belong to one adapter, which is still loading."""

    begin: int
    end: int
    lora: ColdLora


class MixedLora:
    """PassLora of a pass in which the adapters of some tokens are still loading. A worker's failure affects only those
    tokens, since rows of a pass share no values."""

    def __init__(self, on_device: PassLora | None, parts: Sequence[LoadingPart], send: Callable[[], object]) -> None:
        """`on_device`: LoRA of the tokens whose adapters are on the device; None if there are none. `send`: sends the
        inputs of all `parts` to the workers as one message."""
        self._on_device, self._parts, self._send = on_device, parts, send
        self._adds = False
        self._adding: list[LoadingPart] = []

    def begin(self, layer: int, group: str, x: torch.Tensor) -> bool:
        # workers first: they compute while the device does the rest
        self._adding = [part for part in self._parts if part.lora.begin(layer, group, x[part.begin : part.end])]
        self._send()
        self._adds = self._on_device is not None and self._on_device.begin(layer, group, x)
        return self._adds or bool(self._adding)

    def finish(self, layer: int, group: str, ys: Sequence[torch.Tensor]) -> None:
        if self._adds:
            assert self._on_device is not None
            self._on_device.finish(layer, group, ys)
        for part in self._adding:
            part.lora.finish(layer, group, [y[part.begin : part.end] for y in ys])


class Joining:
    """Chooses the requests that join a pass, and reserves workers for them. Only the engine's thread calls it."""

    def __init__(self, cold: ColdPasses, runner: ModelRunner, start_lora: StartLora) -> None:
        self.cold, self._runner, self._start_lora = cold, runner, start_lora

    def choose(self, running: Collection[Request], is_loaded: IsLoaded) -> Collection[str]:
        """Returns the ids of requests whose next token can be computed now although their adapter is still loading."""
        waiting = [r for r in running if r.decoding and not r.awaits_adapter and not is_loaded(r)]
        if not waiting:
            return ()
        rows = Counter(request.lease.digest for request in waiting if request.lease is not None)
        leases = {request.lease.digest: request.lease for request in waiting if request.lease is not None}
        parts = [(leases[digest], count) for digest, count in rows.items()]
        chosen = self.cold.cold_start.joining(parts, len(running) - len(waiting))
        return {request.id for request in waiting if request.lease is not None and request.lease.digest in chosen}

    def join(self, rows: Sequence[Row]) -> Joined:
        """Prepares the rows of a pass whose adapters are loading, and returns them. Rows for which no worker is free
        are in `left_out` of the result."""
        joined = Joined(self.cold, self._runner, self._start_lora)
        for row in rows:
            lease = row.request.lease
            if lease is not None and not self.cold.cold_start.store.loaded(lease):
                joined.add(row, lease)
        return joined


class Joined:
    """Rows of one hot pass whose adapters are still loading. `close` must be called when the pass has ended,
    successfully or not."""

    def __init__(self, cold: ColdPasses, runner: ModelRunner, start_lora: StartLora) -> None:
        self._cold, self._runner, self._start_lora = cold, runner, start_lora
        self._messages: PassMessages | None = None
        """messages to the workers about this pass, shared by all adapters; None until workers are reserved"""
        self._workers: dict[str, AssistedPass | None] = {}
        self._parts: list[tuple[list[Row], Lease, LoadingPart]] = []
        self.left_out: list[Row] = []

    def __bool__(self) -> bool:
        """Returns whether any row has joined."""
        return bool(self._workers)

    def add(self, row: Row, lease: Lease) -> None:
        starts = self._cold.cold_start
        if lease.digest not in self._workers:
            workers = self._begin(lease, starts.assist)
            if workers is None and not starts.on_device(lease):
                self.left_out.append(row)
                return
            self._workers[lease.digest] = workers
        cold = row.request.cold
        if cold is not None and cold.waits_since:
            cold.exposed += time.monotonic() - cold.waits_since
            cold.waits_since = 0.0

    def _begin(self, lease: Lease, assist: Assist | None) -> AssistedPass | None:
        """Reserves workers for the adapter. Returns None when none is free."""
        if assist is None:
            return None
        self._messages = self._messages or assist.messages()
        layout = assist.store.layout(lease)
        return assist.join(self._messages, lease, layout) if self._messages is not None else None

    def _send(self) -> None:
        if self._messages is not None:
            self._messages.send()

    def lora(self, rows: list[Row], decodes: bool) -> PassLora | None:
        """Returns the LoRA of a pass of these rows; None if none has an adapter. `decodes`: whether all are decode
        rows."""
        batch = build_lora(rows, batch_device(self._runner), without=self._workers)
        on_device = None if batch.empty else self._start_lora(batch, decodes)
        at = 0
        for lease, same in groupby(rows, lambda row: row.request.lease):
            of_one = list(same)
            end = at + sum(row.length for row in of_one)
            if lease is not None and lease.digest in self._workers:
                self._parts.append((of_one, lease, LoadingPart(at, end, self._loading_lora(of_one, lease))))
            at = end
        return MixedLora(on_device, [part for _, _, part in self._parts], self._send) if self._parts else on_device

    def _loading_lora(self, rows: list[Row], lease: Lease) -> ColdLora:
        on_device = self._start_lora(build_lora(rows, batch_device(self._runner)), True)
        return self._cold.cold_start.lora(lease, on_device, self._workers[lease.digest])

    def close(self, computed: bool) -> Collection[Row]:
        """Releases the workers. If the pass was `computed`, records which layers the workers computed. Returns the rows
        whose results are invalid because a worker failed: their steps are repeated once the adapter is loaded."""
        failed: list[Row] = []
        for rows, _, part in self._parts:
            part.lora.close()
            if not computed:
                continue
            for row in rows:
                self._record_pass(row.request, part.lora)
            if part.lora.poisoned:
                failed += rows
        if computed and self._parts and not failed:
            self._cold.cold_start.observe_joined([(lease, len(rows), part.lora) for rows, lease, part in self._parts])
        for workers in self._workers.values():  # also those of rows that did not fit in the pass
            if workers is not None:
                workers.end()
        if self._messages is not None:
            self._messages.end()
        return failed

    def _record_pass(self, request: Request, lora: ColdLora) -> None:
        assert request.cold is not None  # set at admission, since its adapter was not loaded
        request.cold.layers_cpu += lora.layers_on_cpu
        request.cold.layers_device += lora.layers_on_device
        if lora.poisoned:
            log.warning("request %s: a CPU worker failed; the step is computed again", request.id)
            request.change_state(RequestState.AWAITING_ADAPTER)
            request.cold.replays += 1
            self._cold.replays += 1
