"""Comparison of the node's books of vLLM's slots with what vLLM's workers hold, and the bound on vLLM's silence."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from node_agent.vllm.driver import Driver
from node_agent.vllm.slots import Slot, SlotStore
from node_agent.vllm.worker_extension import WorkerAdapters

CHECK_S = 5.0
"""Seconds between two checks."""
MAX_GAP_S = 1.0
"""Maximum seconds between two polls that count as silence: while this process itself was stopped, vLLM was not
silent."""

log = logging.getLogger("garnish.engine")


class Watch:
    """Asks vLLM's workers every CHECK_S seconds which adapters they hold. One thread calls all methods."""

    def __init__(self, driver: Driver, store: SlotStore, answer_s: float) -> None:
        self._driver, self._store, self._answer_s = driver, store, answer_s
        self._next_at = time.monotonic() + CHECK_S
        self._awaiting = False
        """whether a question has no answer yet"""
        self._expected: list[Slot] = []
        self._polled = self._sign = self._silent = 0.0

    def poll(self) -> str:
        """Asks when it is time. Returns why vLLM must be taken for dead; empty if it need not."""
        now = time.monotonic()
        gap, self._polled = min(now - self._polled, MAX_GAP_S), now
        sign = self._driver.last_sign
        if not self._awaiting or sign != self._sign:
            self._sign, self._silent = sign, 0.0
        else:
            self._silent += gap
        if self._silent > self._answer_s:
            return f"vLLM has not answered for {self._silent:.0f} s"
        if not self._awaiting and now >= self._next_at:
            self._awaiting, self._expected = True, list(self._store.device.values())
            self._driver.request_reports()
        return ""

    def compare(self, workers: Sequence[WorkerAdapters]) -> None:
        """Takes the answer, and logs an error for each worker that holds other adapters than those in the books."""
        self._awaiting, self._next_at = False, time.monotonic() + CHECK_S
        expected = sorted(slot.number for slot in self._expected if slot.failure is None)
        for rank, adapters in enumerate(workers):
            if adapters["slots"] != expected or adapters["host"] != expected:
                extra = {"rank": rank, "expected": expected, "slots": adapters["slots"], "host": adapters["host"]}
                log.error("a worker of vLLM has loaded other adapters than the node has recorded", extra=extra)
