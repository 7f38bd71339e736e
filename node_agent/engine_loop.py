"""Main loop of an engine process: commands from the API process, iterations of the engine, events to the API
process."""

from __future__ import annotations

import logging
import selectors
import time
from collections.abc import Callable
from functools import partial

from node_agent.engine.base import EngineBase
from node_agent.engine.stats import stats_of
from node_agent.engine_channel import Channel, Disconnected, WakeUp
from node_agent.heartbeat import Heartbeat
from node_agent.idle_work import QUIET_S, EndingWork, IdleWork
from node_agent.ipc import Cancel, Command, PrefetchHints, Ready, Submit

STATS_INTERVAL = 0.2
"""Seconds between two snapshots of an idle engine. A working engine sends them at least MIN_STATS_INTERVAL apart."""
MIN_STATS_INTERVAL = 0.05
CHECK_INTERVAL = 60.0
"""Seconds between two checks of adapter memory of an idle engine."""
RECONNECT_INTERVAL = 0.1

log = logging.getLogger("garnish.engine")


class Loop:
    """Main loop: runs the engine for successive API processes until `stopping`."""

    def __init__(
        self,
        engine: EngineBase,
        ready: Ready,
        wake: WakeUp,
        stopping: Callable[[], bool],
        idle: EndingWork | None = None,
    ) -> None:
        self.engine, self.ready, self.wake, self.stopping, self.idle = engine, ready, wake, stopping, idle
        self._active_at = time.monotonic()
        self._stats_at = 0.0
        self._snapshot = stats_of(engine)
        self._check_at = time.monotonic() + CHECK_INTERVAL
        self._arrived: list[Command] = []
        """Commands that arrived during a measurement and are not carried out yet."""
        self._hints: PrefetchHints | None = None
        """Hints that the engine follows."""
        self._worked_last: IdleWork | EndingWork | None = None
        """Idle work whose turn was the last."""

    def run(self, path: str, heartbeat: int | None) -> None:
        """Serves API processes at the socket `path`, one after the other, until `stopping` returns True. `heartbeat`:
        descriptor of the memory for heartbeats; None: none are written."""
        if heartbeat is not None:
            self.engine.pulse.report = Heartbeat(heartbeat).beat
        while not self.stopping():
            self.engine.pulse.beat()
            try:
                channel = Channel(path)
            except Disconnected:
                time.sleep(RECONNECT_INTERVAL)  # the API process is starting or restarting
                continue
            try:
                self.serve(channel)
            finally:
                channel.close()

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
            log.info("the API process has ended", extra={"reason": str(error)})
        finally:
            selector.close()
            self.drop_all()

    def drop_all(self) -> None:
        self._arrived, self._hints = [], None
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
        commands, self._arrived = self._arrived + channel.receive(), []
        for command in commands:
            if isinstance(command, Submit):
                self.engine.submit(command.request)
            elif isinstance(command, Cancel):
                self.engine.cancel(command.id)
            elif isinstance(command, PrefetchHints):
                self._hints = command
                self.engine.prefetcher.want(command.residency)
            else:
                self.engine.answer(command)

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
        for line in self.engine.heal():
            log.error("adapter memory is damaged", extra={"reason": line})
        self._check_at = time.monotonic() + CHECK_INTERVAL

    def _measure(self, channel: Channel, selector: selectors.BaseSelector) -> bool:
        """Does a piece of the performance measurement, or of work on CPU workers, until a message arrives. Returns
        False when there is nothing to do now.

        The two take turns, since on a busy host the performance measurement can last for half an hour.
        """
        works: list[IdleWork | EndingWork] = []
        if self.idle is not None and not self.idle.ended:
            works.append(self.idle)
        if self.engine.worker_manager is not None:
            works.append(self.engine.worker_manager)
        if works and (self.engine.busy or self.engine.store.loading_bytes or self.engine.prefetcher.underway):
            self._active_at = time.monotonic()
        if not works or time.monotonic() < self._active_at + QUIET_S:
            return False
        works.sort(key=lambda work: work is self._worked_last)
        keep_alive = partial(self._keep_alive, channel, selector)
        for work in works:
            if work.work(keep_alive):
                self._worked_last = work
                self._send_decision(channel)
                return True
        return False

    def _send_decision(self, channel: Channel) -> None:
        """Sends the Ready message again if the decision on CPU workers has changed."""
        now = self.engine.ready_now(self.ready)
        if now != self.ready:
            self.ready = now
            channel.send([now])

    def _keep_alive(self, channel: Channel, selector: selectors.BaseSelector) -> bool:
        """Keeps the connection alive during a measurement, and returns whether the engine has other work.

        When a snapshot is due, sends the last one again. An engine without messages counts as dead, but a new snapshot
        would include what the measurement borrows.
        """
        self.engine.pulse.beat()
        if time.monotonic() >= self._stats_at:
            channel.send([self._snapshot])
            self._stats_at = time.monotonic() + STATS_INTERVAL
        return self.stopping() or self._has_arrived(channel, selector)

    def _has_arrived(self, channel: Channel, selector: selectors.BaseSelector) -> bool:
        """Returns whether commands have arrived that the engine must carry out.

        The gateway repeats its hints every few seconds, so a measurement would never end if it yielded to them. Hints
        that are the same as before only stay valid for longer.
        """
        read = selectors.EVENT_READ  # the end of a copy also wakes the engine, but is no reason to stop
        if any(key.fileobj is channel.socket and bool(events & read) for key, events in selector.select(0)):
            for command in channel.receive():
                if isinstance(command, PrefetchHints) and command == self._hints and not self._arrived:
                    self.engine.prefetcher.want(command.residency)
                else:
                    self._arrived.append(command)
        return bool(self._arrived)

    def _wait(self, channel: Channel, selector: selectors.BaseSelector) -> None:
        """Waits for a message, a wake-up by a load, a request's deadline, or the next snapshot. Checks adapter memory
        first."""
        if self._arrived:
            return
        self._check_memory()
        until = min(self._stats_at, self.engine.next_deadline() or self._stats_at)
        write = selectors.EVENT_WRITE if channel.wants_write else 0
        selector.modify(channel.socket, selectors.EVENT_READ | write)
        selector.select(max(0.0, until - time.monotonic()))
        self.wake.clear()
