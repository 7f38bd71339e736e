"""The cores that the engine and its CPU LoRA workers share: all are the engine's while no worker is armed."""

from __future__ import annotations

import os
from collections.abc import Collection

import torch

from node_agent.cores import usable_cores

CHEAP_CHANGE = 2
"""Threads up to which a change of their number costs a few microseconds. Above it libgomp ends and starts a thread at
each change (20 to 50 us), so the number changes once per stretch of assisted layers instead of once per handoff."""


class EngineCores:
    """Lends cores to workers and takes them back. Called by the engine's thread alone."""

    def __init__(self, threads: int, workers: Collection[int]) -> None:
        """`threads`: torch threads of the engine while no worker is armed; `workers`: numbers of the workers' cores."""
        self._all = os.sched_getaffinity(0)
        self._without_workers = self._all - set(workers) or self._all
        self.threads = threads
        self.fewer = max(1, min(threads, usable_cores() - len(workers)))
        """Torch threads of the engine while workers are armed."""
        self.per_handoff = threads <= CHEAP_CHANGE
        """True if cores change hands at each handoff, False if once per stretch of assisted layers."""

    @property
    def slowdown(self) -> float:
        """Factor by which the engine's own products take longer while workers are armed, at most."""
        return self.threads / self.fewer

    def lend(self) -> None:
        os.sched_setaffinity(0, self._without_workers)
        if self.fewer != self.threads:
            torch.set_num_threads(self.fewer)

    def take_back(self) -> None:
        os.sched_setaffinity(0, self._all)
        if self.fewer != self.threads:
            torch.set_num_threads(self.threads)
