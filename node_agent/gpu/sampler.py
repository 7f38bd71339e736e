"""Samples one GPU in a separate thread, so that a call that hangs blocks no other thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec.structs import replace

from cluster.gpu import GpuFacts, GpuLoad
from node_agent.gpu.nvml import GpuFailed, Nvml, NvmlProblem, load_nvml
from node_agent.gpu.reading import read_errors, read_identity, read_load, with_xid

SAMPLE_INTERVAL_S = 2.0
MAX_CALL_S = 20.0
"""Seconds after which a sample counts as hung; waking up a GPU takes seconds."""
CLOSE_LIMIT_S = 3.0
RETRY_S = 30.0
"""Seconds before NVML is tried again after a problem."""
MIN_PAUSE_S = 0.1
"""Minimum seconds between two samples, even if Xid errors arrive in between."""


class Sample(msgspec.Struct, frozen=True):
    """State of a GPU at one moment. `load` is None if it could not be read."""

    facts: GpuFacts
    load: GpuLoad | None = None


class Sampler:
    """Samples a GPU in a separate thread every `interval` seconds. `clock` returns monotonic seconds."""

    def __init__(
        self, uuid: str, interval: float = SAMPLE_INTERVAL_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._uuid, self._interval, self._clock = uuid, interval, clock
        self._latest: Sample | None = None
        self._nvml: Nvml | None = None
        self._since: float | None = None
        """monotonic time at which the current sample began; None between samples"""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-sampler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def latest(self) -> Sample | None:
        """Returns the last sample; None before the first, and on a host without NVML. While a call hangs, the sample's
        facts name the call as their problem."""
        since, latest = self._since, self._latest
        if since is None or self._clock() - since < MAX_CALL_S:
            return latest
        facts = latest.facts if latest is not None else GpuFacts(uuid=self._uuid)
        call = self._nvml.calling if self._nvml is not None else ""
        return Sample(replace(facts, problem=f"{call or 'nvmlInit'} does not return"))

    def close(self) -> None:
        """Ends the thread, or abandons it if a call hangs."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_LIMIT_S)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._since = self._clock()
            try:
                library = load_nvml()
                if library is None:
                    return
                self._nvml = Nvml(library)
                self._watch(self._nvml)
                return
            except GpuFailed as failure:
                self._fail(failure)
                return
            except NvmlProblem as problem:
                self._latest = Sample(replace(self._facts(), problem=str(problem)))
            finally:
                self._since = None
            self._stop.wait(RETRY_S)

    def _facts(self) -> GpuFacts:
        return self._latest.facts if self._latest is not None else GpuFacts(uuid=self._uuid)

    def _fail(self, failure: GpuFailed) -> None:
        facts = self._facts()
        self._latest = Sample(replace(facts, fault=facts.fault or f"the GPU is lost ({failure})"))

    def _watch(self, nvml: Nvml) -> None:
        """Samples until `close`. Raises GpuFailed, or NvmlProblem if the first calls fail."""
        handle = _handle(nvml, self._uuid)
        facts, load = read_identity(nvml, handle, self._uuid), None
        events = _xid_events(nvml, handle)
        while not self._stop.is_set():
            self._since = self._clock()
            facts = read_errors(nvml, handle, facts)
            self._latest = Sample(facts, load)  # published in case the next line fails
            load = read_load(nvml, handle)
            self._latest = Sample(facts, load)
            self._since = None
            xid = self._wait(nvml, events)
            if xid is not None:
                facts = with_xid(facts, xid)
                self._latest = Sample(facts, load)

    def _wait(self, nvml: Nvml, events: Any) -> int | None:
        """Waits for an Xid error until the next sample is due. Returns its number, or None. Raises GpuFailed."""
        pause = self._interval
        if events is not None:
            self._since = self._clock() + self._interval
            try:
                event = nvml.call("nvmlEventSetWait", events, round(self._interval * 1e3))
                return int(event.eventData)
            except NvmlProblem as problem:
                if problem.code == nvml.NVML_ERROR_TIMEOUT:  # none came
                    pause = MIN_PAUSE_S
            finally:
                self._since = None
                self._stop.wait(MIN_PAUSE_S)
        self._stop.wait(pause)
        return None


def _handle(nvml: Nvml, uuid: str) -> Any:
    """Returns NVML's handle of the GPU. Raises NvmlProblem, or GpuFailed, also for a GPU that has disappeared."""
    try:
        return nvml.call("nvmlDeviceGetHandleByUUID", uuid)
    except NvmlProblem as problem:
        if problem.code == nvml.NVML_ERROR_NOT_FOUND:
            raise GpuFailed(str(problem)) from problem
        raise


def _xid_events(nvml: Nvml, handle: Any) -> Any:
    """Returns NVML's event set for Xid errors of the GPU; None if it does not report them. Raises GpuFailed."""
    events = nvml.ask("nvmlEventSetCreate")
    if events is None:
        return None
    try:
        nvml.call("nvmlDeviceRegisterEvents", handle, nvml.nvmlEventTypeXidCriticalError, events)
    except NvmlProblem:
        return None
    return events
