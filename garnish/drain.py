"""Drains nodes before they end. A draining node gets no new requests, and has time to finish its running ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from garnish.calls import drain_call, nodes_call
from garnish.client import Client
from garnish.errors import GarnishError
from gateway.routes.nodes import NodeItem, NodeList

POLL_SECONDS = 0.2
GONE = ("not_found", "node_failed")


def known_nodes(client: Client) -> dict[str, NodeItem]:
    """Returns the gateway's nodes by id.

    Raises GarnishError; its type is `unreachable` if the gateway can't be reached.
    """
    return {str(node.record["id"]): node for node in client.ask(nodes_call(), NodeList).nodes}


def drain(client: Client, nodes: Iterable[str], seconds: float, report: Callable[[str], None]) -> list[str]:
    """Drains the nodes that are registered at the gateway, and waits until they have no open requests.

    It waits for at most `seconds`, and calls `report` with its progress. Returns the ids of the nodes that were not
    draining before, for `undrain`. Raises GarnishError. If any exception is raised, including Ctrl-C, these nodes are
    undrained.
    """
    served, waiting, drained = known_nodes(client), list[str](), list[str]()
    try:
        for node in sorted(set(nodes) & set(served)):
            if served[node].record["state"] != "draining":
                drained.append(node)  # before the request, since its reply may be lost
            if set_draining(client, node, True):
                waiting.append(node)
        drained = [node for node in drained if node in waiting]
        _wait(client, waiting, seconds, report)
    except BaseException:
        undrain(client, drained)
        raise
    return drained


def _wait(client: Client, waiting: list[str], seconds: float, report: Callable[[str], None]) -> None:
    deadline = time.monotonic() + seconds
    while waiting:
        nodes = known_nodes(client)
        waiting = [node for node in waiting if node in nodes and open_requests(nodes[node])]
        if not waiting or time.monotonic() > deadline:
            return
        report(f"draining: requests are open on {', '.join(waiting)}")
        time.sleep(POLL_SECONDS)


def set_draining(client: Client, node: str, drain: bool) -> bool:
    """Drains the node, or undrains it if `drain` is False.

    Returns False if there is no such node. Raises GarnishError.
    """
    try:
        client.ask(drain_call(node, drain), NodeItem)
    except GarnishError as error:
        if error.type not in GONE:
            raise
        return False
    return True


def undrain(client: Client, nodes: Iterable[str]) -> None:
    """Lets draining nodes take new requests again.

    Stops silently at the first failure, since the caller is already raising another error.
    """
    try:
        for node in nodes:
            set_draining(client, node, False)
    except GarnishError:
        return


def gpu_fault(node: NodeItem) -> str:
    """Returns the reason why the node's GPU can no longer be used, or an empty string if it can."""
    return str((node.record.get("gpu") or {}).get("fault", ""))


def open_requests(node: NodeItem) -> int:
    return int(node.record["running"]) + int(node.record["queued"]) + node.reserved
