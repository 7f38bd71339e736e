"""Starts gateway and nodes, keeps them alive, and stops them in order."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from garnish.errors import FrontDoorError, StartError
from garnish.run_gateway import GatewayProcessConfig
from garnish.run_node import NodeProcessConfig
from garnish.screen import Screen
from garnish.settings import UP_SHUTDOWN_SECONDS
from garnish.up.greeting import greet
from garnish.up.logs import bound_log, fresh_log, last_problem, log_of
from garnish.up.opening import MAX_CRASHES, Opening
from garnish.up.prepare import Prepared, UpOptions, prepare, state_directory
from node_agent import supervisor
from node_agent.supervisor import Child, Signals

GATEWAY_GRACE = UP_SHUTDOWN_SECONDS + 5.0
NO_REASON = "no reason was logged"
TICK = 0.2
"""Seconds between looks at the opening thread."""
LOG_SECONDS = 5.0
"""Between two looks at the size of the logs."""


def up(options: UpOptions, screen: Screen) -> int:
    """Serves until TERM or INT. Returns the exit code. Raises FrontDoorError when the service can't be started."""
    with state_directory(options.state) as state, screen:
        screen.progress(f"reading {options.file}")
        prepared = prepare(options, state)
        screen.end_progress()
        logging.getLogger(supervisor.__name__).disabled = True  # what it has to say reaches the screen by `on_end`
        return _serve(prepared, screen)


def _serve(prepared: Prepared, screen: Screen) -> int:
    ends = Ends(screen)
    children = _children(prepared, ends)
    opening = Opening(prepared, [log_of(prepared.state, node.node_id) for node in prepared.nodes], screen.progress)
    with Signals() as signals:
        try:
            _tend(children)
            opening.start()
            _open(opening, children, ends, signals, prepared, screen)
            while not signals.stop_requested:
                signals.wait(min(_tend(children), LOG_SECONDS))
                for child in children:
                    bound_log(log_of(prepared.state, child.name))
        finally:
            opening.cancel()
            screen.progress("stopping")
            _stop(children[:1], GATEWAY_GRACE, signals)
            _stop(children[1:], node_grace(prepared), signals)
            screen.end_progress()
    screen.note("stopped")
    return 0


def node_grace(prepared: Prepared) -> float:
    """Returns the seconds that nodes get to stop: they bound their own stop, and get a little longer than that."""
    return max(node.stop_seconds for node in prepared.nodes) + supervisor.STOP_SLACK + 3.0


def _children(prepared: Prepared, ends: Ends) -> list[Child]:
    """Returns the processes, the gateway first, then the nodes; none is started yet."""
    parent = os.getpid()
    modules: list[tuple[str, str, msgspec.Struct]] = [
        ("gateway", "garnish.run_gateway", GatewayProcessConfig(parent, prepared.gateway)),
        *((node.node_id, "garnish.run_node", NodeProcessConfig(parent, node)) for node in prepared.nodes),
    ]
    children = []
    for name, module, config in modules:
        log = fresh_log(prepared.state, name)
        children.append(Child(name, module, config, log, partial(ends.told, name, log)))
    return children


def _open(
    opening: Opening, children: Sequence[Child], ends: Ends, signals: Signals, prepared: Prepared, screen: Screen
) -> None:
    """Tends the processes until the functions are deployed, and greets; or until someone asks to stop. Raises
    FrontDoorError when they can't be deployed, or a process can't start."""
    while opening.is_alive() and not signals.stop_requested:
        signals.wait(min(_tend(children), TICK))
        for child in children:
            if child.failures >= MAX_CRASHES:
                log = log_of(prepared.state, child.name)
                raise StartError(f"{child.name} can't start: {ends.reasons.get(child.name, NO_REASON)} (log: {log})")
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
    """Stops the processes: TERM to all, and KILL to who is still there after `grace` seconds; a second Ctrl-C cuts the
    wait short."""
    deadline = time.monotonic() + grace
    asked = signals.stop_requested
    for child in children:
        child.ask_to_stop()
    while (now := time.monotonic()) < deadline and signals.stop_requested == asked:
        if all(child.reap(now) for child in children):
            break
        signals.wait(min(TICK, deadline - now))
    for child in children:
        child.kill()


class Ends:
    """Tells the person at the terminal why a process ended by itself."""

    def __init__(self, screen: Screen) -> None:
        self.reasons: dict[str, str] = {}
        """Of each process's last end."""
        self._screen = screen
        self._starts: dict[str, int] = {}
        """Where in its log the process that runs now began to write."""

    def told(self, name: str, log: Path, code: int) -> None:
        reason = last_problem(log, self._starts.get(name, 0))
        self._starts[name] = log.stat().st_size
        self.reasons[name] = reason or NO_REASON
        why = f" ({reason})" if reason else ""
        self._screen.note(f"{name} ended with code {code}{why} and starts again; log: {log}")
