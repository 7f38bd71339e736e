"""Starts the gateway and nodes, deploys the declared functions, restarts processes and stops them in order."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import httpx
import msgspec

from garnish.client import Client
from garnish.errors import FrontDoorError, GarnishError, StartError
from garnish.logs import bound_log, end_reason, fresh_log, last_problem, log_of, refuses_to_start, times_ended
from garnish.run_gateway import GatewayProcessConfig
from garnish.run_node import NodeProcessConfig
from garnish.screen import Screen
from garnish.up.greeting import greet
from garnish.up.prepare import Deployment, Prepared, UpOptions, prepare, state_directory
from gateway.routes.deploy import DeployReply
from node_agent import supervisor
from node_agent.supervisor import Child, Signals

GATEWAY_SLACK, NODES_SLACK = 2.5, 4.0
"""Seconds after which processes are killed, in addition to those for open requests: the gateway, and then the nodes.
Supervisors that kill after 30 seconds wait for both, by default."""
NO_REASON = "no reason was logged"
TICK_SECONDS = 0.2
LOG_SECONDS = 5.0
READY_SECONDS = 600.0
"""Timeout in seconds for the start. Loading a large base model from a slow disk takes minutes."""
POLL_SECONDS = 0.1
MAX_CRASHES = 3
"""Number of exits of a node's processes after which the start fails, if the node was never ready."""
DEPLOY_TRIES = 3
NODES_SECONDS = 60.0
"""Seconds for which a policy is retried if its provisioned copies do not fit on the nodes. Some nodes may not have
reported yet."""


def up(options: UpOptions, screen: Screen) -> int:
    """Serves until TERM or INT. Returns the exit code. Raises FrontDoorError if the service can't be started."""
    with state_directory(options.state) as state, screen:
        screen.progress(f"reading {options.file}")
        prepared = prepare(options, state)
        screen.end_progress()
        if prepared.warning:
            screen.notice(prepared.warning)
        logging.getLogger(supervisor.__name__).disabled = True  # `on_end` shows its messages on the screen instead
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
            began, seconds = time.monotonic(), prepared.gateway.shutdown_seconds
            _stop(children[:1], began + seconds + GATEWAY_SLACK, signals)
            _stop(children[1:], began + seconds + NODES_SLACK, signals)
            screen.end_progress()
    screen.notice("stopped")
    return 0


def _children(prepared: Prepared, ends: Ends) -> list[Child]:
    """Returns the processes, first the gateway, then the nodes. None is started yet."""
    parent = os.getpid()
    modules: list[tuple[str, str, msgspec.Struct]] = [
        ("gateway", "garnish.run_gateway", GatewayProcessConfig(parent, prepared.gateway)),
        *((node.node_id, "garnish.run_node", NodeProcessConfig(parent, node)) for node in prepared.nodes),
    ]
    children = []
    for name, module, config in modules:
        log = fresh_log(prepared.state, name)
        children.append(Child(name, module, config, log, partial(ends.record_end, name, log)))
    return children


def _open(
    opening: Opening, children: Sequence[Child], ends: Ends, signals: Signals, prepared: Prepared, screen: Screen
) -> None:
    """Supervises the processes until the functions are deployed, and then prints the greeting.

    Returns early, without a greeting, if a stop is requested. Raises FrontDoorError if a function can't be deployed or
    a process can't start.
    """
    while opening.is_alive() and not signals.stop_requested:
        signals.wait(min(_tend(children), TICK_SECONDS))
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


def _stop(children: Sequence[Child], deadline: float, signals: Signals) -> None:
    """Stops the processes with TERM, and with KILL at `deadline` (monotonic seconds) or after a second Ctrl-C."""
    stop_requests = signals.stop_requested
    for child in children:
        child.ask_to_stop()
    while (now := time.monotonic()) < deadline and signals.stop_requested == stop_requests:
        if all(child.reap(now) for child in children):
            break
        signals.wait(min(TICK_SECONDS, deadline - now))
    for child in children:
        child.kill()


class Ends:
    """Prints and records the reasons why processes ended by themselves."""

    def __init__(self, screen: Screen) -> None:
        self.reasons: dict[str, str] = {}
        self._screen = screen
        self._starts: dict[str, int] = {}

    def record_end(self, name: str, log: Path, code: int) -> None:
        reason = last_problem(log, self._starts.get(name, 0))
        self._starts[name] = log.stat().st_size
        self.reasons[name] = reason or NO_REASON
        why = f" ({reason})" if reason else ""
        self._screen.notice(f"{name} ended with code {code}{why} and starts again; log: {log}")


def check_nodes(logs: list[Path]) -> None:
    """Raises StartError if a node can't start, according to its log.

    That is the case if its engine refuses to start, or if its processes ended MAX_CRASHES times.
    """
    for log in logs:
        if refuses_to_start(log) or times_ended(log) >= MAX_CRASHES:
            reason = end_reason(log) or last_problem(log) or "no reason was logged"  # a refusal precedes the end
            raise StartError(f"{log.stem} can't start: {reason} (log: {log})")


class Opening(threading.Thread):
    """Thread that waits until the service is ready, and then deploys the declared functions.

    Before the thread ends, it sets `result` to the replies of the deploys, or to the error.
    """

    def __init__(self, prepared: Prepared, node_logs: list[Path], report: Callable[[str], None]) -> None:
        super().__init__(name="opening", daemon=True)
        self.result: list[DeployReply] | FrontDoorError | None = None
        self._prepared = prepared
        self._logs = node_logs
        self._report = report
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        self._cancelled.set()

    def run(self) -> None:
        try:
            self._wait_until_ready()
            self.result = [self._deploy(deployment) for deployment in self._prepared.deployments]
            for deployment in self._prepared.deployments:
                self._set_policy(deployment)
        except FrontDoorError as error:
            self.result = error

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        with httpx.Client(base_url=self._prepared.url, timeout=5.0) as http:
            while not self._cancelled.wait(POLL_SECONDS):
                problem = _readiness(http)
                if problem is None:
                    return
                self._report(problem)
                check_nodes(self._logs)
                if time.monotonic() > deadline:
                    raise StartError(f"not ready after {READY_SECONDS:.0f} s: {problem}")
        raise StartError("stopped before the service was ready")

    def _deploy(self, deployment: Deployment) -> DeployReply:
        self._report(f"deploying {deployment.name}")
        for attempt in range(1, DEPLOY_TRIES + 1):
            try:
                with Client(connection=deployment.connection) as client:
                    return client.deploy(deployment.name, deployment.directory, deployment.alias)
            except GarnishError as error:
                if error.type not in ("unavailable", "overloaded", "conflict") or attempt == DEPLOY_TRIES:
                    raise StartError(f"functions.{deployment.name}: {error.report()}") from error
                self._cancelled.wait(error.retry_after or 1.0)
        raise AssertionError("unreachable")

    def _set_policy(self, deployment: Deployment) -> None:
        """Sets the function's policy to that of the service file.

        A policy that does not fit is retried for NODES_SECONDS. Raises StartError if the policy is refused.
        """
        deadline = time.monotonic() + NODES_SECONDS
        while deployment.policy:
            try:
                with Client(connection=deployment.connection) as client:
                    client.set_policy(deployment.name, deployment.policy)
                return
            except GarnishError as error:
                if error.type not in ("unavailable", "overloaded", "conflict") or time.monotonic() > deadline:
                    raise StartError(f"functions.{deployment.name}: {error.report()}") from error
                self._report(f"waiting: {error.message}")
                if self._cancelled.wait(error.retry_after or 1.0):
                    raise StartError("stopped before the service was ready") from error


def _readiness(http: httpx.Client) -> str | None:
    """Returns a text about what the service waits for, or None if the service is ready."""
    try:
        response = http.get("/readyz")
    except httpx.HTTPError:
        return "waiting for the gateway"
    if response.status_code == 200:
        return None
    try:
        message = str(msgspec.json.decode(response.content)["error"]["message"])
        return f"waiting: {message.removeprefix('not ready: ')}"
    except (msgspec.DecodeError, KeyError, TypeError):
        return f"waiting: /readyz answers {response.status_code}"
