"""Cores that the engine shares with its CPU LoRA workers. The engine has all of them except while a worker is armed,
that is, polls for commands."""

from __future__ import annotations

import os
from collections.abc import Collection

import torch

from node_agent.cores import usable_cores

CHEAP_CHANGE = 2
"""Number of the engine's threads up to which changing it costs a few microseconds. Above it, libgomp ends and starts
threads at each change (20 to 50 us). The number then changes once per run of consecutive assisted layers, not per
handoff."""


class EngineCores:
    """Lends cores of the engine to workers, and takes them back. Only the engine's thread calls it."""

    def __init__(self, threads: int, workers: Collection[int]) -> None:
        """`threads`: torch threads of the engine while no worker is armed; `workers`: core numbers of the workers."""
        self._all = os.sched_getaffinity(0)
        self.threads = threads
        self._reduced = False
        self.per_handoff = threads <= CHEAP_CHANGE
        """True if cores pass to the workers and back at each handoff; False if once per run of consecutive assisted
        layers."""
        self.leave(workers)

    def leave(self, workers: Collection[int]) -> None:
        """Sets the cores that the engine gives up while workers are armed."""
        self._without_workers = self._all - set(workers) or self._all
        self.fewer = max(1, min(self.threads, usable_cores() - len(workers)))
        """Torch threads of the engine while workers are armed."""

    @property
    def slowdown(self) -> float:
        """Returns the maximum factor by which the engine's products slow down while workers are armed."""
        return self.threads / self.fewer

    def lend(self) -> None:
        os.sched_setaffinity(0, self._without_workers)
        self._reduced = self.fewer != self.threads
        if self._reduced:
            torch.set_num_threads(self.fewer)

    def take_back(self) -> None:
        os.sched_setaffinity(0, self._all)
        if self._reduced:
            torch.set_num_threads(self.threads)
