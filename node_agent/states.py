"""States of an adapter in host memory, in a folder and on the device, and of a request, with their legal transitions.

docs/design/adapter-memory.md and docs/design/seams.md show the transitions.
"""

from __future__ import annotations

from collections.abc import Container
from enum import Enum, Flag, auto


class Thread(Flag):
    """Threads that may make a transition."""

    ENGINE = auto()
    LOADER = auto()
    """loader thread that holds the lock of its pool"""


class HostState(Enum):
    """Progress of a load from the object store or the disk to host memory."""

    READING_HEADER = "reading header"
    WAITING_FOR_ROOM = "waiting for room"
    """header read; the adapter has no pages and no slot in the host table yet"""
    FETCHING = "fetching"
    RECLAIMED = "reclaimed"
    """still fetching, but a more urgent load needs the room; ends once nobody wants the adapter"""
    COMPLETE = "complete"
    """all layers verified and in host memory"""
    FAILED = "failed"
    ABANDONED = "abandoned"
    """load ended before it was complete, because nobody wanted the adapter any more"""


class DeviceState(Enum):
    """Progress of a copy from host memory to the device."""

    COPYING = "copying"
    CANCELLED = "cancelled"
    """no more layers are enqueued, but a thread may still write the adapter's pages"""
    COPIED = "copied"
    """all layers on the device, but the engine has not recorded it yet"""
    COPY_FAILED = "copy failed"
    COPY_STOPPED = "copy stopped"
    """cancelled copy that has ended: no thread writes the adapter's pages"""
    READY = "ready"
    FAILED = "failed"
    """copy failed; the pages stay until the adapter's leases end"""
    ABANDONED = "abandoned"
    """copy cancelled, and the adapter removed from the device"""


class FolderState(Enum):
    """Progress of a load of an adapter's original files to a folder in host memory, on a node with vLLM."""

    MEASURING = "measuring"
    """the sizes of its files are being read"""
    WAITING = "waiting for room"
    FETCHING = "fetching"
    COMPLETE = "complete"
    """both files verified and in the folder"""
    FAILED = "failed"
    ABANDONED = "abandoned"
    """nobody wanted the adapter any more; its thread may still write the folder"""


class RequestState(Enum):
    """State of a request in the engine. `Request.decoding` says whether a RUNNING request prefills or decodes."""

    WAITING = "waiting"
    RUNNING = "running"
    """in the batch: hot passes compute its prompt, then its tokens"""
    COLD_PREFILLING = "cold prefilling"
    """in the batch: an open cold pass computes a chunk of its prompt"""
    AWAITING_ADAPTER = "awaiting adapter"
    """in the batch: its next step waits until the whole adapter is on the device"""
    PREEMPTED = "preempted"
    """back in the queue; it has lost its row, its KV blocks and its computed state"""
    FINISHED = "finished"


HOST_TRANSITIONS = {
    (HostState.READING_HEADER, HostState.WAITING_FOR_ROOM): Thread.LOADER,
    (HostState.READING_HEADER, HostState.FAILED): Thread.LOADER,
    (HostState.WAITING_FOR_ROOM, HostState.FETCHING): Thread.ENGINE,
    (HostState.FETCHING, HostState.RECLAIMED): Thread.ENGINE,
    (HostState.FETCHING, HostState.COMPLETE): Thread.ENGINE | Thread.LOADER,
    (HostState.FETCHING, HostState.FAILED): Thread.LOADER,
    (HostState.FETCHING, HostState.ABANDONED): Thread.ENGINE | Thread.LOADER,
    (HostState.RECLAIMED, HostState.COMPLETE): Thread.LOADER,
    (HostState.RECLAIMED, HostState.FAILED): Thread.LOADER,
    (HostState.RECLAIMED, HostState.ABANDONED): Thread.LOADER,
}
"""Threads that may make each transition. The engine's thread ends a fetch only when it starts it: the adapter has no
bytes, or nobody wants it any more."""

DEVICE_TRANSITIONS = {
    (DeviceState.COPYING, DeviceState.CANCELLED): Thread.ENGINE,
    (DeviceState.COPYING, DeviceState.COPIED): Thread.LOADER,
    (DeviceState.COPYING, DeviceState.COPY_FAILED): Thread.LOADER,
    (DeviceState.CANCELLED, DeviceState.COPY_STOPPED): Thread.LOADER,
    (DeviceState.COPIED, DeviceState.READY): Thread.ENGINE,
    (DeviceState.COPY_FAILED, DeviceState.FAILED): Thread.ENGINE,
    (DeviceState.COPY_STOPPED, DeviceState.ABANDONED): Thread.ENGINE,
}
"""Threads that may make each transition."""

FOLDER_TRANSITIONS = {
    (FolderState.MEASURING, FolderState.WAITING): Thread.LOADER,
    (FolderState.MEASURING, FolderState.FAILED): Thread.LOADER,
    (FolderState.MEASURING, FolderState.ABANDONED): Thread.ENGINE,
    (FolderState.WAITING, FolderState.FETCHING): Thread.ENGINE,
    (FolderState.WAITING, FolderState.ABANDONED): Thread.ENGINE,
    (FolderState.FETCHING, FolderState.COMPLETE): Thread.LOADER,
    (FolderState.FETCHING, FolderState.FAILED): Thread.LOADER,
    (FolderState.FETCHING, FolderState.ABANDONED): Thread.ENGINE,
}
"""Threads that may make each transition."""

REQUEST_TRANSITIONS = {
    (RequestState.WAITING, RequestState.RUNNING): Thread.ENGINE,
    (RequestState.WAITING, RequestState.FINISHED): Thread.ENGINE,
    (RequestState.RUNNING, RequestState.COLD_PREFILLING): Thread.ENGINE,
    (RequestState.RUNNING, RequestState.AWAITING_ADAPTER): Thread.ENGINE,
    (RequestState.RUNNING, RequestState.PREEMPTED): Thread.ENGINE,
    (RequestState.RUNNING, RequestState.FINISHED): Thread.ENGINE,
    (RequestState.COLD_PREFILLING, RequestState.RUNNING): Thread.ENGINE,
    (RequestState.COLD_PREFILLING, RequestState.AWAITING_ADAPTER): Thread.ENGINE,
    (RequestState.COLD_PREFILLING, RequestState.FINISHED): Thread.ENGINE,
    (RequestState.AWAITING_ADAPTER, RequestState.RUNNING): Thread.ENGINE,
    (RequestState.AWAITING_ADAPTER, RequestState.PREEMPTED): Thread.ENGINE,
    (RequestState.AWAITING_ADAPTER, RequestState.FINISHED): Thread.ENGINE,
    (RequestState.PREEMPTED, RequestState.RUNNING): Thread.ENGINE,
    (RequestState.PREEMPTED, RequestState.FINISHED): Thread.ENGINE,
}
"""Threads that may make each transition."""


class IllegalTransition(RuntimeError):
    """Raised when the new state may not follow the current one."""


def check_transition(before: Enum, after: Enum, legal: Container[tuple[Enum, Enum]]) -> None:
    """Raises IllegalTransition unless `legal` has the transition."""
    if (before, after) not in legal:
        raise IllegalTransition(f"{type(before).__name__}: {after.value} does not follow {before.value}")
