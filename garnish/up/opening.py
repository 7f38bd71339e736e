"""From started processes to a service that can be used: wait for readiness, deploy the declared functions."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import msgspec

from garnish.client import Client
from garnish.errors import FrontDoorError, GarnishError, StartError
from garnish.up.logs import end_reason, refuses_to_start, times_ended
from garnish.up.prepare import Deployment, Prepared
from gateway.routes.deploy import DeployReply

READY_SECONDS = 600.0
"""Loading a large base model from a slow disk may take minutes."""
POLL_SECONDS = 0.1
MAX_CRASHES = 3
"""A node whose processes ended that often before it ever was ready won't get ready."""
DEPLOY_TRIES = 3
NODES_SECONDS = 60.0
"""For which a policy that does not fit is tried again: the nodes that it needs may not have reported yet."""


def check_nodes(logs: list[Path]) -> None:
    """Raises StartError if the log of a node says that it won't get ready: its engine refuses to start, or processes of
    it ended MAX_CRASHES times."""
    for log in logs:
        if refuses_to_start(log) or times_ended(log) >= MAX_CRASHES:
            raise StartError(f"{log.stem} can't start: {end_reason(log) or 'no reason was logged'} (log: {log})")


class Opening(threading.Thread):
    """Waits until the service is ready, and deploys the declared functions. `result` is set before the thread ends: the
    functions' replies, or why the service can't be used."""

    def __init__(self, prepared: Prepared, node_logs: list[Path], tell: Callable[[str], None]) -> None:
        super().__init__(name="opening", daemon=True)
        self.result: list[DeployReply] | FrontDoorError | None = None
        self._prepared = prepared
        self._logs = node_logs
        self._tell = tell
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
                self._tell(problem)
                check_nodes(self._logs)
                if time.monotonic() > deadline:
                    raise StartError(f"not ready after {READY_SECONDS:.0f} s: {problem}")
        raise StartError("stopped before the service was ready")

    def _deploy(self, deployment: Deployment) -> DeployReply:
        self._tell(f"deploying {deployment.name}")
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
        """Sets the function's policy as the file states it. One that does not fit is tried again for NODES_SECONDS.
        Raises StartError for a policy that is refused."""
        deadline = time.monotonic() + NODES_SECONDS
        while deployment.policy:
            try:
                with Client(connection=deployment.connection) as client:
                    client.set_policy(deployment.name, deployment.policy)
                return
            except GarnishError as error:
                if error.type not in ("unavailable", "overloaded", "conflict") or time.monotonic() > deadline:
                    raise StartError(f"functions.{deployment.name}: {error.report()}") from error
                self._tell(f"waiting: {error.message}")
                if self._cancelled.wait(error.retry_after or 1.0):
                    raise StartError("stopped before the service was ready") from error


def _readiness(http: httpx.Client) -> str | None:
    """Returns what the service waits for; None when it is ready."""
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
