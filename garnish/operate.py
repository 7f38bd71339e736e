"""Requests that operators make, most with an admin key: `Client.ask` sends them."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote

from garnish.client import Client
from garnish.connection import find_connection
from garnish.protocol import Call


def admin_client(state: Path) -> Client:
    """Returns a client for the service that the state directory belongs to, with its admin key."""
    return Client(connection=find_connection(None, None, os.environ, state=state, admin=True))


def nodes_call() -> Call:
    """Asks for all nodes. The reply is gateway.routes.nodes.NodeList."""
    return Call(method="GET", url="/nodes")


def pools_call() -> Call:
    """Asks for the load of the pools. The reply is gateway.routes.pools.PoolList."""
    return Call(method="GET", url="/pools")


def lease_call(holder: str, seconds: float) -> Call:
    """Asks for the autoscaler's lease for so many seconds; 0 gives it back. The reply is
    gateway.routes.pools.LeaseReply."""
    return Call(method="PUT", url="/pools/autoscaler", json={"holder": holder, "seconds": seconds})


def node_adapters_call(node: str) -> Call:
    """Asks for the adapters that a node holds. The reply is gateway.routes.nodes.NodeAdapters."""
    return Call(method="GET", url=f"/nodes/{quote(node, safe='')}/adapters")


def explain_call(request_id: str) -> Call:
    """Asks what happened to a request. The reply is gateway.calls.explanations.ExplainReply."""
    return Call(method="GET", url=f"/explain/{quote(request_id, safe='')}")


def drain_call(node: str, drain: bool) -> Call:
    """Drains a node, or lets it serve again (`drain` False). The reply is gateway.routes.nodes.NodeItem."""
    return Call(method="POST", url=f"/nodes/{quote(node, safe='')}/{'drain' if drain else 'undrain'}")


def move_call(node: str, action: str, function: str | None, digest: str | None) -> Call:
    """Has a node fetch or drop an adapter, named by its function or its digest. `action`: prefetch or evict. The reply
    is gateway.routes.nodes.MovedReply."""
    ref = {"function": function, "digest": digest}
    named = {name: value for name, value in ref.items() if value is not None}
    return Call(method="POST", url=f"/nodes/{quote(node, safe='')}/{action}", json=named)
