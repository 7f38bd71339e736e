"""Starts and stops a node of a local pool for Terraform's provisioners.

The Terraform module local_pool calls `python -m garnish.pool_node create|stop SPEC`, where SPEC is JSON. `create`
starts the node as `python -m garnish.pool_node serve SPEC`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec

from garnish.logs import bound_log, fresh_log, last_problem, log_of
from garnish.settings import POOL_NODE_STOP_SECONDS, run_directory
from infra.processes import NodeKey, Process, StillRunning, is_alive, stop, write_pid_file

START_SECONDS = 60.0
"""Timeout in seconds until the node's API process listens for its engine; the base model is loaded after that."""
POLL_SECONDS = 0.05
LOG_SECONDS = 5.0


class Spec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings that the Terraform module local_pool passes. All paths are absolute."""

    service: str
    pool: str
    node: str
    service_file: str
    state: str
    gateway_url: str
    secret_file: str
    host_nodes: int = 1

    @property
    def key(self) -> NodeKey:
        return NodeKey(state=self.state, service=self.service, pool=self.pool, node=self.node)


class CreateError(Exception):
    """The node's process did not start."""


def create(spec: Spec) -> None:
    """Starts the node in a separate session, and waits until its engine's socket exists.

    Raises CreateError if the node ends, or if this takes longer than START_SECONDS. Raises it also if Terraform has
    ended meanwhile (by kill -9), since then its state would not contain the node.
    """
    parent = os.getppid()
    stop(spec.key, POOL_NODE_STOP_SECONDS)  # ends processes that an interrupted creation has left behind
    state = Path(spec.state)
    socket = run_directory(state, spec.node) / "engine.sock"
    socket.unlink(missing_ok=True)
    (state / "logs").mkdir(mode=0o700, parents=True, exist_ok=True)
    log = fresh_log(state, spec.node)
    _asked_by(parent, spec)
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "garnish.pool_node", "serve", msgspec.json.encode(spec).decode()],
            cwd=state,
            env={**os.environ, **spec.key.environment()},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # it outlives terraform, and Ctrl-C in the terminal does not reach it
        )
    running = write_pid_file(spec.key, process.pid)
    try:
        if running is None or not _came_up(running, socket, parent, spec):
            raise CreateError(f"{spec.node} can't start: {last_problem(log) or 'no reason was logged'} (log: {log})")
    except CreateError:
        stop(spec.key, 0.0)
        raise


def _came_up(running: Process, socket: Path, parent: int, spec: Spec) -> bool:
    deadline = time.monotonic() + START_SECONDS
    while is_alive(running) and not socket.exists() and time.monotonic() < deadline:
        _asked_by(parent, spec)
        time.sleep(POLL_SECONDS)
    _asked_by(parent, spec)
    return is_alive(running) and socket.exists()


def _asked_by(parent: int, spec: Spec) -> None:
    """Raises CreateError if the parent process, Terraform, has ended."""
    if os.getppid() != parent:
        raise CreateError(f"{spec.node} was not started, for Terraform has ended")


def serve(spec: Spec) -> None:
    """Runs `garnish node` in this process, with a thread that limits the size of its log."""
    log = log_of(Path(spec.state), spec.node)
    threading.Thread(target=_keep_bounded, args=(log,), name="log", daemon=True).start()
    from garnish.cli.main import main as command_line

    command_line(node_command(spec))


def node_command(spec: Spec) -> list[str]:
    """Returns the command-line arguments of `garnish` that start the node."""
    return [
        "node", "-f", spec.service_file, "--state", spec.state, "--gateway", spec.gateway_url,
        "--secret-file", spec.secret_file, "--node-id", spec.node, "--pool", spec.pool,
        "--host-nodes", str(spec.host_nodes),
    ]  # fmt: skip


def _keep_bounded(log: Path) -> None:
    while True:
        time.sleep(LOG_SECONDS)
        bound_log(log)


def main() -> int:
    action, text = sys.argv[1:]
    spec = msgspec.json.decode(text, type=Spec)
    try:
        if action == "create":
            create(spec)
        elif action == "stop":
            stop(spec.key, POOL_NODE_STOP_SECONDS)
        elif action == "serve":
            serve(spec)
        else:
            raise SystemExit(f"expected create, stop or serve, found {action!r}")
    except (CreateError, StillRunning) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
