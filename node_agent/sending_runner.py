"""Contract of runners that take batches in host memory (docs/design/seams.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch

from node_agent.adapter_memory.store import AdapterStore
from node_agent.types import LoraBatch, ModelRunner, PassLora


@runtime_checkable
class SendingRunner(Protocol):
    """ModelRunner that takes batches in host memory and copies them to its device itself."""

    @property
    def feeds(self) -> bool:
        """Returns whether a decode step may be started before the previous one has ended. Its input tokens are then
        chosen on the device (StepBatch.fed)."""

    def serve(
        self, store: AdapterStore, kernel: str, *, max_rows: int, chunk_tokens: int, max_context: int
    ) -> Callable[[LoraBatch, bool], PassLora]:
        """Prepares passes of at most `max_rows` sequences and `chunk_tokens` prompt tokens. Returns the function that
        starts their LoRA (a StartLora).

        `kernel`: name of the LoRA kernel (lora_choice). Called once, before the first adapter is loaded.
        """

    def capture_handoffs(self) -> None:
        """Prepares passes in which CPU workers compute the LoRA of layers that have not arrived
        (`ArrivingLora.hands_over`). Called at the start if there are such workers. Without this call these passes still
        work, but take longer."""


def batch_device(runner: ModelRunner) -> torch.device:
    """Returns the device on which the runner's batches are created."""
    return torch.device("cpu") if isinstance(runner, SendingRunner) else runner.device
