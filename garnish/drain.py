"""Nodes that are about to go: no new requests for them, and time for those that run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from garnish.calls import drain_call, nodes_call
from garnish.client import Client
from garnish.errors import GarnishError
from gateway.routes.nodes import NodeItem, NodeList

POLL_SECONDS = 0.2
GONE = ("not_found", "node_failed")
"""Errors of a node that has died: nothing runs on it."""


def known_nodes(client: Client) -> dict[str, NodeItem]:
    """Returns the nodes as the gateway sees them, by id. Raises GarnishError, of type `unreachable` where there is no
    gateway."""
    return {str(node.record["id"]): node for node in client.ask(nodes_call(), NodeList).nodes}


def drain(client: Client, nodes: Iterable[str], seconds: float, tell: Callable[[str], None]) -> list[str]:
    """Drains those nodes that the gateway knows, and waits until none has a request open, `seconds` at most. `tell` is
    called while it waits.

    Returns those that served before, for `undrain`. Raises GarnishError; after that, and whatever else ends it (Ctrl-C,
    a listener that has gone), they serve again: whoever gives up ends none of them.
    """
    known, waiting, drained = known_nodes(client), list[str](), list[str]()
    try:
        for node in sorted(set(nodes) & set(known)):
            if known[node].record["state"] != "draining":
                drained.append(node)  # before the answer, which may not come
            if set_draining(client, node, True):
                waiting.append(node)
        drained = [node for node in drained if node in waiting]
        _wait(client, waiting, seconds, tell)
    except BaseException:
        undrain(client, drained)
        raise
    return drained


def _wait(client: Client, waiting: list[str], seconds: float, tell: Callable[[str], None]) -> None:
    deadline = time.monotonic() + seconds
    while waiting:
        known = known_nodes(client)
        waiting = [node for node in waiting if node in known and open_requests(known[node])]
        if not waiting or time.monotonic() > deadline:
            return
        tell(f"draining: requests are open on {', '.join(waiting)}")
        time.sleep(POLL_SECONDS)


def set_draining(client: Client, node: str, drain: bool) -> bool:
    """Drains the node, or lets it serve again. Returns whether there is such a node: it may have died, or never come
    up. Raises GarnishError."""
    try:
        client.ask(drain_call(node, drain), NodeItem)
    except GarnishError as error:
        if error.type not in GONE:
            raise
        return False
    return True


def undrain(client: Client, nodes: Iterable[str]) -> None:
    """Lets the nodes take new requests again; ends without an error at the first failure, since the caller already has
    a worse one to tell."""
    try:
        for node in nodes:
            set_draining(client, node, False)
    except GarnishError:
        return


def gpu_fault(node: NodeItem) -> str:
    """Returns why the node's GPU can't be used any more; empty where it can."""
    return str((node.record.get("gpu") or {}).get("fault", ""))


def open_requests(node: NodeItem) -> int:
    return int(node.record["running"]) + int(node.record["queued"]) + node.reserved
