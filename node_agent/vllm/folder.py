"""Adapter of the host tier of a node with vLLM: a PEFT folder in memory, or on its way there."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from cluster.messages import Adapter
from cluster.residency import HeldTier
from node_agent.adapter_memory.priority import Priority
from node_agent.leases import LoadFailed
from node_agent.states import FOLDER_TRANSITIONS, FolderState, check_transition
from node_agent.vllm.cached_files import FilesWriter

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


ENDED = (FolderState.COMPLETE, FolderState.FAILED, FolderState.ABANDONED)


@dataclass(eq=False)
class Folder:
    """Adapter whose files are in the host tier, or on their way there. The engine's thread writes `priority`, `leased`
    and `holds`; FOLDER_TRANSITIONS says which thread changes `state`; loader threads write the rest."""

    adapter: Adapter
    path: Path
    state: FolderState = FolderState.MEASURING
    priority: Priority = Priority.REQUEST
    leased: bool = False
    tenant: str = ""
    """tenant for whom it is loaded; empty for no tenant"""
    holds: int = 0
    """number of loads into a slot that read the folder"""
    busy: bool = False
    """whether a loader thread reads or writes its files"""
    failure: LoadFailed | None = None
    size: int = 0
    """bytes of both files; 0 until they are known"""
    read: int = 0
    origin: HeldTier = "absent"
    """tier that its files come from: disk or absent"""
    writer: FilesWriter | None = None
    """writer to the disk cache; None if the files are not written there"""
    began: float = field(default_factory=time.monotonic)
    arrived: float = 0.0

    def change_state(self, state: FolderState) -> None:
        """Sets the state. The caller must hold the lock of the loader threads. Raises IllegalTransition unless
        FOLDER_TRANSITIONS has the transition."""
        check_transition(self.state, state, FOLDER_TRANSITIONS)
        self.state = state

    @property
    def digest(self) -> str:
        return self.adapter.digest

    @property
    def complete(self) -> bool:
        return self.state is FolderState.COMPLETE

    @property
    def abandoned(self) -> bool:
        return self.state is FolderState.ABANDONED

    @property
    def failed(self) -> bool:
        return self.state is FolderState.FAILED or self.abandoned

    @property
    def fetched(self) -> float:
        return self.read / self.size if self.size else 0.0

    @property
    def in_use(self) -> bool:
        return self.holds > 0 or self.state not in ENDED
