"""The contract of runners that take batches in host memory (docs/design/seams.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch

from node_agent.adapter_memory.store import AdapterStore
from node_agent.types import LoraBatch, ModelRunner, PassLora


@runtime_checkable
class SendingRunner(Protocol):
    """A ModelRunner that takes batches in host memory, and sends them to its device itself."""

    @property
    def feeds(self) -> bool:
        """Returns whether a decode step may be started before the one in front of it has ended (StepBatch.fed)."""

    def serve(
        self, store: AdapterStore, kernel: str, *, max_rows: int, chunk_tokens: int, max_context: int
    ) -> Callable[[LoraBatch, bool], PassLora]:
        """Prepares passes of at most `max_rows` sequences and `chunk_tokens` prompt tokens, with the `kernel` for
        adapters (lora_choice). Returns their StartLora. Called once, before the first adapter is loaded."""

    def capture_handoffs(self) -> None:
        """Prepares passes whose ArrivingLora `hands_over`. Called at the start, where there are CPU workers whose
        handoffs the device's stream orders; without it such passes are computed all the same."""


def batch_device(runner: ModelRunner) -> torch.device:
    """Returns where the tensors of the runner's batches are made."""
    return torch.device("cpu") if isinstance(runner, SendingRunner) else runner.device
