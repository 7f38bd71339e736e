"""`garnish nodes`: the nodes, their adapters, draining. All of it needs an admin key."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from garnish.cli.options import DEFAULT_STATE, AsJson, NoHeader, State, Tenant, Url, open_client

Node = Annotated[str, typer.Argument(help="The node's id.")]
Function = Annotated[
    str | None, typer.Argument(help="NAME, NAME:ALIAS or NAME:VERSION, of the tenant named with --tenant.")
]
Digest = Annotated[str | None, typer.Option("--digest", help="A version's digest, instead of a function.")]


def register(app: typer.Typer) -> None:
    nodes = typer.Typer(help="The nodes: list them, see their adapters, drain them.", invoke_without_command=True)
    nodes.callback()(list_unless_told)
    nodes.command("list")(list_nodes)
    nodes.command()(adapters)
    nodes.command()(prefetch)
    nodes.command()(evict)
    nodes.command()(drain)
    nodes.command()(undrain)
    app.add_typer(nodes, name="nodes")


def list_unless_told(
    context: typer.Context,
    url: Url = None,
    state: State = DEFAULT_STATE,
    no_header: NoHeader = False,
    as_json: AsJson = False,
) -> None:
    """The nodes: list them, see their adapters, drain them."""
    if context.invoked_subcommand is None:
        list_nodes(url, state, no_header, as_json)
    elif url is not None or state != DEFAULT_STATE or no_header or as_json:
        raise typer.BadParameter("options come after the subcommand")


def list_nodes(
    url: Url = None, state: State = DEFAULT_STATE, no_header: NoHeader = False, as_json: AsJson = False
) -> None:
    """List the nodes as the scheduler sees them; --json says more, such as why a node has no CPU workers."""
    from garnish.operate import nodes_call
    from garnish.screen import Screen
    from garnish.table import Column
    from gateway.routes.nodes import NodeList

    screen = Screen(as_json, header=not no_header)
    with open_client(url, state, admin=True) as client:
        found = client.ask(nodes_call(), NodeList)
    shown = ("id", "state", "running", "queued", "kv_blocks_free", "url", "error")
    rows = [[str(node.record.get(field, "")) for field in shown] for node in found.nodes]
    for row, node in zip(rows, found.nodes, strict=True):
        row.insert(5, observed_over_forecast(node.record))
        row.insert(6, str(node.record.get("cpu_workers", "-")))
    columns = [
        Column("ID", least=16),
        Column("STATE"),
        Column("RUNNING", number=True),
        Column("QUEUED", number=True),
        Column("KV FREE", number=True),
        Column("OBSERVED/FORECAST", spare=1),
        Column("CPU WORKERS", number=True, spare=1),
        Column("URL", spare=2),
        Column("ERROR", least=20),
    ]
    if any(node.record.get("gpu") for node in found.nodes):
        columns.insert(7, Column("GPU", spare=1))
        for row, node in zip(rows, found.nodes, strict=True):
            row.insert(7, gpu_shown(node.record))
    screen.table(columns, rows)
    screen.result(found)


def gpu_shown(record: Mapping[str, Any]) -> str:
    """Returns the GPU of a node and how it is, as far as that is reported: `0 L4, 5.0 GiB of 24.0 GiB, 87 %, 43 C`."""
    from garnish.sizes import shown_bytes

    gpu, load = record.get("gpu"), record.get("gpu_load") or {}
    if not gpu:
        return "-"
    parts = [f"{gpu.get('index', '')} {gpu.get('name', '')}".strip() or gpu["uuid"]]
    if load.get("memory_used") is not None:
        parts.append(f"{shown_bytes(load['memory_used'])} of {shown_bytes(gpu.get('memory', 0))}")
    if load.get("utilisation") is not None:
        parts.append(f"{load['utilisation']} %")
    if load.get("temperature") is not None:
        parts.append(f"{load['temperature']} C")
    parts += load.get("throttled", ())
    parts += [text for text in ("slow link" if gpu.get("slow_link") else "", gpu.get("problem", "")) if text]
    return ", ".join(parts)


def observed_over_forecast(record: Mapping[str, Any]) -> str:
    """How its passes compare with what its performance model says of them, if there is one."""
    from cluster.model_check import is_off

    ratio = record.get("forecast_ratio")
    if ratio is not None:
        return f"{ratio:.2f}, off" if is_off(ratio) else f"{ratio:.2f}"
    if record.get("performance"):
        return "-"
    measuring = record.get("measuring")
    return "no model" if measuring is None else f"measuring, {measuring:.0%}"


def adapters(
    node: Node,
    url: Url = None,
    state: State = DEFAULT_STATE,
    no_header: NoHeader = False,
    as_json: AsJson = False,
) -> None:
    """List a node's adapters: where they are, and how far those have come that are loading."""
    from garnish.operate import node_adapters_call
    from garnish.screen import Screen
    from garnish.sizes import shown_bytes
    from garnish.table import Column
    from gateway.routes.nodes import NodeAdapters

    screen = Screen(as_json, header=not no_header)
    with open_client(url, state, admin=True) as client:
        found = client.ask(node_adapters_call(node), NodeAdapters)
    rows = [
        [
            entry.digest,
            entry.tier,
            str(max(entry.ranks)) if entry.ranks else "-",
            shown_bytes(entry.bytes),
            str(entry.in_use),
            str(entry.waiting),
            _progress(entry.layers),
        ]
        for entry in found.adapters
    ]
    screen.table(
        [
            Column("DIGEST", least=16, cut=True),
            Column("TIER"),
            Column("RANK", number=True),
            Column("SIZE", number=True),
            Column("IN USE", number=True),
            Column("WAITING", number=True),
            Column("LOADING", least=16),
        ],
        rows,
    )
    if found.unnamed:
        screen.note(f"{found.unnamed} more are on the disk")
    screen.result(found)


def _progress(layers: Sequence[str] | None) -> str:
    """How many layers are in each state: `3 device, 1 host, 4 no`."""
    if layers is None:
        return "-"
    return ", ".join(f"{layers.count(state)} {state}" for state in dict.fromkeys(layers))


def prefetch(
    node: Node,
    function: Function = None,
    digest: Digest = None,
    url: Url = None,
    state: State = DEFAULT_STATE,
    tenant: Tenant = None,
    as_json: AsJson = False,
) -> None:
    """Bring an adapter to a node's device, or to its host memory if the device is in use."""
    _move("prefetch", node, function, digest, url, state, tenant, as_json)


def evict(
    node: Node,
    function: Function = None,
    digest: Digest = None,
    url: Url = None,
    state: State = DEFAULT_STATE,
    tenant: Tenant = None,
    as_json: AsJson = False,
) -> None:
    """Take an adapter off a node: device, host memory and disk. Refused while it is in use."""
    _move("evict", node, function, digest, url, state, tenant, as_json)


def _move(
    action: str,
    node: str,
    function: str | None,
    digest: str | None,
    url: str | None,
    state: Path,
    tenant: str | None,
    as_json: bool,
) -> None:
    from garnish.operate import move_call
    from garnish.screen import Screen
    from gateway.routes.nodes import MovedReply

    if (function is None) == (digest is None):
        raise typer.BadParameter("expected a function, or --digest")
    screen = Screen(as_json)
    with open_client(url, state, tenant or _first_tenant(function, url, state), admin=True) as client:
        moved = client.ask(move_call(node, action, function, digest), MovedReply)
    where = f"now {moved.tier}" if moved.tier is not None else "still loading"
    screen.line(f"{moved.digest} on {moved.node}: {where}")
    screen.result(moved)


def _first_tenant(function: str | None, url: str | None, state: Path) -> str | None:
    """Returns the tenant that a `function` named without one belongs to: the first tenant in the state's credentials.
    Returns None when no function is named, a URL is given, or the state has no credentials."""
    from garnish.credentials import FILE_NAME, read_credentials

    if function is None or url is not None or "GARNISH_URL" in os.environ:
        return None
    known = read_credentials(state / FILE_NAME)
    return known.tenant if known is not None else None


def drain(node: Node, url: Url = None, state: State = DEFAULT_STATE, as_json: AsJson = False) -> None:
    """Give a node no new requests; those that run on it end."""
    _set_draining(node, True, url, state, as_json)


def undrain(node: Node, url: Url = None, state: State = DEFAULT_STATE, as_json: AsJson = False) -> None:
    """Give a node requests again."""
    _set_draining(node, False, url, state, as_json)


def _set_draining(node: str, wanted: bool, url: str | None, state: Path, as_json: bool) -> None:
    from garnish.operate import drain_call
    from garnish.screen import Screen
    from gateway.routes.nodes import NodeItem

    screen = Screen(as_json)
    with open_client(url, state, admin=True) as client:
        found = client.ask(drain_call(node, wanted), NodeItem)
    open_requests = found.record["running"] + found.record["queued"]
    screen.line(f"{node}: {found.record['state']}, {open_requests} requests open")
    screen.result(found)
