"""Starts gateway and nodes, keeps them alive, and stops them in order."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Sequence

from garnish.errors import FrontDoorError, StartError
from garnish.run_gateway import GatewayProcessConfig
from garnish.run_node import NodeProcessConfig
from garnish.screen import Screen
from garnish.settings import UP_SHUTDOWN_SECONDS
from garnish.up.greeting import greet
from garnish.up.logs import fresh_log, last_problem
from garnish.up.opening import MAX_CRASHES, Opening
from garnish.up.prepare import Prepared, UpOptions, prepare, state_directory
from node_agent import supervisor
from node_agent.supervisor import Child, Signals

GATEWAY_GRACE = UP_SHUTDOWN_SECONDS + 5.0
NODE_GRACE = supervisor.GRACE + 3.0
TICK = 0.2
"""Seconds between looks at the opening thread."""


def up(options: UpOptions, screen: Screen) -> int:
    """Serve until TERM or INT. Returns the exit code. Raises FrontDoorError when the service can't be started."""
    with state_directory(options.state) as state, screen:
        screen.progress(f"reading {options.file}")
        prepared = prepare(options, state)
        screen.end_progress()
        watch = _Ends(prepared, screen)
        supervisor.log.addHandler(watch)
        supervisor.log.propagate = False
        return _serve(prepared, screen, watch)


def _serve(prepared: Prepared, screen: Screen, watch: _Ends) -> int:
    parent, logs = os.getpid(), prepared.state / "logs"
    gateway_log = fresh_log(logs, "gateway")
    node_logs = [fresh_log(logs, node.node_id) for node in prepared.nodes]
    gateway = Child("gateway", "garnish.run_gateway", GatewayProcessConfig(parent, prepared.gateway), gateway_log)
    nodes = [
        Child(node.node_id, "garnish.run_node", NodeProcessConfig(parent, node), log)
        for node, log in zip(prepared.nodes, node_logs, strict=True)
    ]
    opening = Opening(prepared, node_logs, screen.progress)
    with Signals() as signals:
        try:
            _tend([gateway, *nodes])
            opening.start()
            _open(opening, [gateway, *nodes], signals, prepared, screen)
            while not signals.stop_requested:
                signals.wait(_tend([gateway, *nodes]))
        finally:
            opening.cancel()
            watch.setLevel(logging.CRITICAL)  # from here on, ends are what was asked for
            screen.progress("stopping")
            _stop([gateway], GATEWAY_GRACE, signals)
            _stop(nodes, NODE_GRACE, signals)
            screen.end_progress()
    return 0


def _open(opening: Opening, children: Sequence[Child], signals: Signals, prepared: Prepared, screen: Screen) -> None:
    """Until the functions are deployed, or someone asks to stop. Raises FrontDoorError when it can't be done."""
    while opening.is_alive() and not signals.stop_requested:
        signals.wait(min(_tend(children), TICK))
        for child in children:
            if child.failures >= MAX_CRASHES:
                log = prepared.state / "logs" / f"{child.name}.log"
                raise StartError(
                    f"{child.name} can't start: {last_problem(log) or 'no reason was logged'} (log: {log})"
                )
    if signals.stop_requested:
        return
    screen.end_progress()
    if isinstance(opening.result, FrontDoorError):
        raise opening.result
    assert opening.result is not None
    greet(prepared, opening.result, screen)


def _tend(children: Sequence[Child]) -> float:
    now = time.monotonic()
    return min(child.tend(now) for child in children)


def _stop(children: Sequence[Child], grace: float, signals: Signals) -> None:
    """TERM to all, and KILL to who is still there after `grace`; a second Ctrl-C cuts the wait short."""
    deadline = time.monotonic() + grace
    asked = signals.stop_requested
    for child in children:
        child.signal(signal.SIGTERM)
    while (now := time.monotonic()) < deadline and signals.stop_requested == asked:
        if all(child.reap(now) for child in children):
            break
        signals.wait(min(TICK, deadline - now))
    for child in children:
        child.kill()


class _Ends(logging.Handler):
    """Tells the person at the terminal when a process ended and is started again."""

    def __init__(self, prepared: Prepared, screen: Screen) -> None:
        super().__init__(logging.WARNING)
        self._logs = prepared.state / "logs"
        self._screen = screen

    def emit(self, record: logging.LogRecord) -> None:
        facts = vars(record)
        log = self._logs / f"{facts['child']}.log"
        reason = last_problem(log)
        told = f"{facts['child']} ended with code {facts['code']}" + (f" ({reason})" if reason else "")
        self._screen.note(f"{told}; starts again in {facts['restart_in']:.1f} s; log: {log}")
