"""Adapter of the host tier of a node with vLLM: a PEFT folder in memory, or on its way there."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path

from cluster.messages import Adapter
from cluster.residency import HeldTier
from node_agent.adapter_memory.priority import Priority
from node_agent.leases import LoadFailed
from node_agent.vllm.cached_files import FilesWriter

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


class FolderState(Enum):
    """States of a folder, in their usual order."""

    MEASURING = auto()
    """the sizes of its files are being read"""
    WAITING = auto()
    """there is no room yet"""
    FETCHING = auto()
    COMPLETE = auto()
    FAILED = auto()
    ABANDONED = auto()
    """nobody wanted the adapter any more"""


ENDED = (FolderState.COMPLETE, FolderState.FAILED, FolderState.ABANDONED)


@dataclass(eq=False)
class Folder:
    """Adapter whose files are in the host tier, or on their way there. The engine's thread writes `priority`,
    `leased`, `holds` and the states WAITING, FETCHING and ABANDONED; loader threads write the rest."""

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
