"""Nodes that are about to go: no new requests for them, and time for those that run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from garnish.client import Client
from garnish.errors import GarnishError
from garnish.operate import drain_call, nodes_call
from gateway.schema import NodeItem, NodeList

POLL_SECONDS = 0.2


def known_nodes(client: Client) -> dict[str, NodeItem]:
    """The nodes as the gateway sees them. Raises GarnishError, of type `unreachable` where there is no gateway."""
    return {str(node.record["id"]): node for node in client.ask(nodes_call(), NodeList).nodes}


def drain(client: Client, nodes: Iterable[str], seconds: float, tell: Callable[[str], None]) -> list[str]:
    """Drain those nodes that the gateway knows, and wait until none has a request open, or for so long.

    Returns the nodes with requests still open. Raises GarnishError.
    """
    waiting = []
    for node in sorted(set(nodes) & set(known_nodes(client))):
        try:
            client.ask(drain_call(node, True), NodeItem)
            waiting.append(node)
        except GarnishError as error:
            if error.type not in ("not_found", "node_failed"):  # it has died: nothing runs on it
                raise
    deadline = time.monotonic() + seconds
    while waiting:
        known = known_nodes(client)
        waiting = [node for node in waiting if node in known and open_requests(known[node])]
        if not waiting or time.monotonic() > deadline:
            break
        tell(f"draining: requests are open on {', '.join(waiting)}")
        time.sleep(POLL_SECONDS)
    return waiting


def open_requests(node: NodeItem) -> int:
    return int(node.record["running"]) + int(node.record["queued"]) + node.reserved
