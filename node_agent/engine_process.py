"""The engine process: owns the device, and exchanges node_agent.ipc messages with the API process over one Unix
socket."""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from functools import partial

import msgspec

from node_agent.collector import end, settle, stop_collecting

if __name__ == "__main__":
    stop_collecting()  # before the imports below load torch

from transformers.utils.logging import disable_progress_bar

from adapters.base_model import BaseModel
from cluster.frames import FrameError, Frames
from cluster.logs import CAPACITY, set_up_logging
from node_agent.adapter_memory.integrity import heal
from node_agent.child import die_with_parent, read_config
from node_agent.config import EngineProcessConfig
from node_agent.device import flush_denormals
from node_agent.engine.loop import Engine
from node_agent.engine.setup import build_engine
from node_agent.engine.stats import stats_of
from node_agent.heartbeat import Heartbeat
from node_agent.ipc import Cancel, Command, EngineEvent, PrefetchHints, Ready, Submit, command_decoder, encode
from node_agent.performance.capacity import capacity_of
from node_agent.performance.idle import QUIET_S, IdleMeasurement
from node_agent.performance.setup import use_performance

STATS_INTERVAL = 0.2
"""Seconds between two snapshots of an idle engine. A working engine sends them at least MIN_STATS_INTERVAL apart."""
MIN_STATS_INTERVAL = 0.05
CHECK_INTERVAL = 60.0
"""Seconds between two checks of adapter memory of an idle engine."""
RECONNECT_INTERVAL = 0.1
MAX_UNSENT = 64 << 20
"""Maximum bytes waiting for an API process that does not read."""

log = logging.getLogger("garnish.engine")


class Disconnected(Exception):
    """Error: the API process is gone or does not read."""


class Channel:
    """Non-blocking connection to the API process."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.socket.connect(path)
        except OSError as error:
            self.socket.close()
            raise Disconnected(str(error)) from error
        self.socket.setblocking(False)
        self._frames = Frames()
        self._unsent = bytearray()

    @property
    def wants_write(self) -> bool:
        return bool(self._unsent)

    def receive(self) -> list[Command]:
        """Returns all commands that have arrived. Raises Disconnected."""
        commands: list[Command] = []
        while True:
            try:
                chunk = self.socket.recv(1 << 18)
            except BlockingIOError:
                return commands
            except OSError as error:
                raise Disconnected(str(error)) from error
            if not chunk:
                raise Disconnected("the API process hung up")
            try:
                for body in self._frames.feed(chunk):
                    commands += command_decoder.decode(body)
            except (FrameError, msgspec.DecodeError) as error:
                raise Disconnected(f"the API process broke the protocol: {error}") from error

    def send(self, events: list[EngineEvent]) -> None:
        """Queues the events as one frame and sends what the socket takes now. Raises Disconnected."""
        if events:
            self._unsent += encode(events)
        while self._unsent:
            try:
                sent = self.socket.send(memoryview(self._unsent)[: 1 << 18])
            except BlockingIOError:
                break
            except OSError as error:
                raise Disconnected(str(error)) from error
            del self._unsent[:sent]
        if len(self._unsent) > MAX_UNSENT:
            raise Disconnected("the API process does not read")

    def close(self) -> None:
        self.socket.close()


class WakeUp:
    """Eventfd by which loader threads wake the engine's main loop."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def set(self) -> None:
        os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return


class Loop:
    """Main loop: runs the engine for successive API processes until `stopping`."""

    def __init__(
        self,
        engine: Engine,
        ready: Ready,
        wake: WakeUp,
        stopping: Callable[[], bool],
        idle: IdleMeasurement | None = None,
    ) -> None:
        self.engine, self.ready, self.wake, self.stopping, self.idle = engine, ready, wake, stopping, idle
        self._active_at = time.monotonic()
        self._stats_at = 0.0
        self._snapshot = stats_of(engine)
        self._check_at = time.monotonic() + CHECK_INTERVAL

    def serve(self, channel: Channel) -> None:
        """Serves one API process until the connection ends or `stopping` returns True. Then cancels all requests in
        flight, since nobody is left to read their tokens."""
        selector = selectors.DefaultSelector()
        selector.register(channel.socket, selectors.EVENT_READ)
        selector.register(self.wake.fd, selectors.EVENT_READ)
        try:
            channel.send([self.ready, stats_of(self.engine)])
            while not self.stopping():
                self._iterate(channel, selector)
        except Disconnected as error:
            # no warning: the supervisor warns of unexpected exits
            log.info("api process gone", extra={"reason": str(error)})
        finally:
            selector.close()
            self.drop_all()

    def drop_all(self) -> None:
        self.engine.cancel_all()
        self.engine.prefetcher.clear()
        self.engine.take_events()

    def _iterate(self, channel: Channel, selector: selectors.BaseSelector) -> None:
        self.engine.pulse.beat()
        self._receive(channel)
        self.engine.prepare()
        is_active = self._report(channel)  # send admissions before the passes, which may take long
        used = self.engine.compute_cold()
        is_active |= self._report(channel)
        worked = used > 0
        for _ in self.engine.compute_hot(used):
            worked = True
            is_active |= self._report(channel)
        if worked or is_active:
            self._active_at = time.monotonic()
        elif not self._measure(channel, selector):
            self._wait(channel, selector)

    def _receive(self, channel: Channel) -> None:
        for command in channel.receive():
            if isinstance(command, Submit):
                self.engine.submit(command.request)
            elif isinstance(command, Cancel):
                self.engine.cancel(command.id)
            elif isinstance(command, PrefetchHints):
                self.engine.prefetcher.want(command.residency)
            else:
                self.engine.orders.take(command)

    def _report(self, channel: Channel) -> bool:
        """Sends new events, and a snapshot when one is due. Returns whether there were new events."""
        self.engine.pulse.beat()
        events = self.engine.take_events()
        happened, now = bool(events), time.monotonic()
        if now >= self._stats_at or (happened and now >= self._stats_at - STATS_INTERVAL + MIN_STATS_INTERVAL):
            self._snapshot = stats_of(self.engine)
            events.append(self._snapshot)
            self._stats_at = now + STATS_INTERVAL
        channel.send(events)
        return happened

    def _check_memory(self) -> None:
        """Checks and repairs adapter memory, at most every CHECK_INTERVAL seconds and only while the engine is idle,
        since this reads the whole table. Logs damage."""
        if self.engine.busy or time.monotonic() < self._check_at:
            return
        for line in heal(self.engine.store):
            log.error("adapter memory is damaged", extra={"reason": line})
        self._check_at = time.monotonic() + CHECK_INTERVAL

    def _measure(self, channel: Channel, selector: selectors.BaseSelector) -> bool:
        """Runs a short piece of the performance measurement, or of work on CPU workers, until a message arrives.
        Returns False when there is nothing to do now."""
        manager = self.engine.worker_manager
        measures = self.idle is not None and not self.idle.ended
        if not measures and manager is None:
            return False
        if self.engine.busy or self.engine.store.loading_bytes or self.engine.prefetcher.underway:
            self._active_at = time.monotonic()
        if time.monotonic() < self._active_at + QUIET_S:
            return False
        keep_alive = partial(self._keep_alive, channel, selector)
        if self.idle is not None and measures:
            return self.idle.work(keep_alive)
        if manager is None or not manager.work(keep_alive):
            return False
        self._send_decision(channel)
        return True

    def _send_decision(self, channel: Channel) -> None:
        """Sends the Ready message again if the decision on CPU workers has changed."""
        now = with_workers(self.ready, self.engine)
        if now != self.ready:
            self.ready = now
            channel.send([now])

    def _keep_alive(self, channel: Channel, selector: selectors.BaseSelector) -> bool:
        """Keeps the connection alive during a measurement, and returns whether a message has arrived.

        When a snapshot is due, sends the last one again. An engine without messages counts as dead, but a new snapshot
        would include what the measurement borrows.
        """
        self.engine.pulse.beat()
        if time.monotonic() >= self._stats_at:
            channel.send([self._snapshot])
            self._stats_at = time.monotonic() + STATS_INTERVAL
        read = selectors.EVENT_READ  # the end of a copy also wakes the engine, but is no reason to stop
        return self.stopping() or any(
            key.fileobj is channel.socket and bool(events & read) for key, events in selector.select(0)
        )

    def _wait(self, channel: Channel, selector: selectors.BaseSelector) -> None:
        """Waits for a message, a wake-up by a load, a request's deadline, or the next snapshot. Checks adapter memory
        first."""
        self._check_memory()
        until = min(self._stats_at, self.engine.next_deadline() or self._stats_at)
        write = selectors.EVENT_WRITE if channel.wants_write else 0
        selector.modify(channel.socket, selectors.EVENT_READ | write)
        selector.select(max(0.0, until - time.monotonic()))
        self.wake.clear()


def ready_message(engine: Engine, base: BaseModel) -> Ready:
    """Returns the first message of an engine's connection."""
    ready = Ready(
        base=base.fingerprint,
        device=str(engine.runner.device),
        dtype=str(engine.runner.dtype).removeprefix("torch."),
        max_context=engine.limits.max_context,
        kv_blocks=engine.blocks.total,
        block_tokens=engine.runner.block_tokens,
        adapter_bytes=engine.store.pool.size,
        max_rows=engine.limits.max_rows,
        host_bytes=engine.store.hosts.memory,
        largest_adapter=engine.store.largest,
        adapter_itemsize=engine.runner.dtype.itemsize,
        takes_wants=engine.limits.prefetch_waste is not None,
    )
    return with_workers(ready, engine)


def with_workers(ready: Ready, engine: Engine) -> Ready:
    """Returns the message with the engine's present number of CPU workers."""
    decision = engine.cold_start.decision
    return msgspec.structs.replace(
        ready,
        cpu_workers=decision.count,
        cpu_workers_reason=decision.reason,
        cpu_workers_ms={name: round(value, 2) for name, value in decision.figures},
    )


def main() -> int:
    set_up_logging("engine")
    disable_progress_bar()  # standard error is for JSON lines only
    flush_denormals()
    config = read_config(EngineProcessConfig)
    if config.parent is not None:
        die_with_parent(config.parent)
    stop_requested = False
    wake = WakeUp()

    def request_stop(*_: object) -> None:
        nonlocal stop_requested
        stop_requested = True
        wake.set()

    signal.signal(signal.SIGTERM, request_stop)
    signal.signal(signal.SIGINT, request_stop)
    try:
        engine, base = build_engine(config.engine, wake.set)
        has_model = use_performance(engine, config.engine, base)
    except Exception as error:  # any error: the log's last error is shown as the reason why the node can't start
        trace = not isinstance(error, (ValueError, OSError))
        extra = {"reason": str(error) or type(error).__name__, "permanent": isinstance(error, ValueError)}
        log.error("engine can't start", extra=extra, exc_info=trace)
        return 1
    ready = ready_message(engine, base)
    log.info("engine is warm", extra=msgspec.to_builtins(ready))
    log.info(CAPACITY, extra=msgspec.to_builtins(capacity_of(engine, base)))
    settle()
    idle = None if has_model else IdleMeasurement(engine, config.engine, base)
    loop = Loop(engine, ready, wake, lambda: stop_requested, idle)
    if config.heartbeat is not None:
        engine.pulse.report = Heartbeat(config.heartbeat).beat
    while not stop_requested:
        engine.pulse.beat()
        try:
            channel = Channel(config.socket)
        except Disconnected:
            time.sleep(RECONNECT_INTERVAL)  # the API process is starting or restarting
            continue
        try:
            loop.serve(channel)
        finally:
            channel.close()
    engine.close()
    return 0


if __name__ == "__main__":
    end(main())
