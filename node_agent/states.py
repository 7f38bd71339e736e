"""States of an adapter in host memory and on the device, and of a request, with the legal transitions between them.

docs/design/adapter-memory.md and docs/design/seams.md show the tables.
"""

from __future__ import annotations

from collections.abc import Container
from enum import Enum, Flag, auto


class Thread(Flag):
    """Threads that make a transition."""

    ENGINE = auto()
    LOADER = auto()
    """a thread of the loader, under the lock of its pool"""


class HostState(Enum):
    """Progress of a load from the store or the disk to host memory."""

    READING_HEADER = "reading header"
    WAITING_FOR_ROOM = "waiting for room"
    """layout known; neither pages nor a slot of the host table"""
    FETCHING = "fetching"
    RECLAIMED = "reclaimed"
    """still fetching; ends once nobody wants the adapter, since a more urgent load needs its room"""
    COMPLETE = "complete"
    """every layer verified and in host memory"""
    FAILED = "failed"
    ABANDONED = "abandoned"
    """ended before it was complete, since nobody wanted the adapter any more"""


class DeviceState(Enum):
    """Progress of a copy from host memory to the device."""

    COPYING = "copying"
    CANCELLED = "cancelled"
    """nothing more is enqueued; a thread may still write the adapter's pages"""
    COPIED = "copied"
    """every layer on the device; the engine has not taken note of it"""
    COPY_FAILED = "copy failed"
    COPY_STOPPED = "copy stopped"
    """the end of a cancelled copy; no thread writes the adapter's pages"""
    READY = "ready"
    FAILED = "failed"
    """kept until its leases end"""
    ABANDONED = "abandoned"
    """off the device"""


class RequestState(Enum):
    """Place of a request in the engine. `Request.decoding` says whether a running one prefills or decodes."""

    WAITING = "waiting"
    RUNNING = "running"
    """batch member: hot passes compute its prompt and then its tokens"""
    COLD_PREFILLING = "cold prefilling"
    """batch member whose prompt's chunk an open cold pass computes"""
    AWAITING_ADAPTER = "awaiting adapter"
    """batch member whose next step waits for the whole adapter"""
    PREEMPTED = "preempted"
    """request back in the queue, without its place and what was computed"""
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
"""Threads by transition. The engine's thread ends a fetch only as it starts it: of an adapter without bytes, or one
that nobody wants."""

DEVICE_TRANSITIONS = {
    (DeviceState.COPYING, DeviceState.CANCELLED): Thread.ENGINE,
    (DeviceState.COPYING, DeviceState.COPIED): Thread.LOADER,
    (DeviceState.COPYING, DeviceState.COPY_FAILED): Thread.LOADER,
    (DeviceState.CANCELLED, DeviceState.COPY_STOPPED): Thread.LOADER,
    (DeviceState.COPIED, DeviceState.READY): Thread.ENGINE,
    (DeviceState.COPY_FAILED, DeviceState.FAILED): Thread.ENGINE,
    (DeviceState.COPY_STOPPED, DeviceState.ABANDONED): Thread.ENGINE,
}
"""Threads by transition."""

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
"""Threads by transition."""


class IllegalTransition(RuntimeError):
    """A state that does not follow the one before it."""


def check_transition(before: Enum, after: Enum, legal: Container[tuple[Enum, Enum]]) -> None:
    """Raises IllegalTransition unless the table has the transition."""
    if (before, after) not in legal:
        raise IllegalTransition(f"{type(before).__name__}: {after.value} does not follow {before.value}")
