"""`garnish nodes`: lists nodes and their adapters, moves adapters, and drains nodes. Needs an admin key."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from garnish.cli.options import Output, Service, TableOutput, TenantService, commands, flat
from garnish.screen import Column, Screen
from garnish.sizes import format_bytes

Node = Annotated[str, typer.Argument(help="The node's id.")]
Function = Annotated[
    str | None, typer.Argument(help="NAME, NAME:ALIAS or NAME:VERSION, of the tenant named with --tenant.")
]
Digest = Annotated[str | None, typer.Option("--digest", help="A version's digest, instead of a function.")]


def list_by_default(service: Service, output: TableOutput, context: typer.Context) -> None:
    """List the nodes, show their adapters, or drain nodes."""
    if context.invoked_subcommand is None:
        list_nodes(service, output)
    elif (service, output) != (Service(), TableOutput()):
        raise typer.BadParameter("options come after the subcommand")


def list_nodes(service: Service, output: TableOutput) -> None:
    """List the nodes as known to the scheduler, and the reasons for their CPU workers. --json has more fields."""
    from garnish.calls import nodes_call
    from gateway.routes.nodes import NodeList

    screen = output.screen()
    with service.client(admin=True) as client:
        reply = client.ask(nodes_call(), NodeList)
    shown = ("id", "state", "running", "queued", "kv_blocks_free", "url", "error")
    rows = [[str(node.record.get(field, "")) for field in shown] for node in reply.nodes]
    for row, node in zip(rows, reply.nodes, strict=True):
        row.insert(5, format_forecast_ratio(node.record))
        row.insert(6, str(node.record.get("cpu_workers", "-")))
    columns = [
        Column("ID", min_width=16),
        Column("STATE"),
        Column("RUNNING", number=True),
        Column("QUEUED", number=True),
        Column("KV FREE", number=True),
        Column("OBSERVED/FORECAST", spare=1),
        Column("CPU WORKERS", number=True, spare=1),
        Column("URL", spare=2),
        Column("ERROR", min_width=20),
    ]
    if any(node.record.get("gpu") for node in reply.nodes):
        columns.insert(7, Column("GPU", spare=1))
        for row, node in zip(rows, reply.nodes, strict=True):
            row.insert(7, format_gpu(node.record))
    screen.table(columns, rows)
    for line in () if screen.as_json else (format_workers(node.record) for node in reply.nodes):
        if line:
            screen.notice(line)
    screen.result(reply)


def format_workers(record: Mapping[str, Any]) -> str:
    """Returns a text with a node's number of CPU workers and the reason: `node-1: 2 CPU workers: they gain; ...`.

    The text is empty if the node gives no reason.
    """
    count, reason = record.get("cpu_workers"), record.get("cpu_workers_reason", "")
    if count is None or not reason:
        return ""
    return f"{record.get('id', '')}: {count} CPU worker{'' if count == 1 else 's'}: {reason}"


def format_gpu(record: Mapping[str, Any]) -> str:
    """Returns a text with the state of a node's GPU: `0 L4, 5.0 GiB of 24.0 GiB, 87 %, 43 C`.

    Values that the node does not report are left out.
    """
    gpu, load = record.get("gpu"), record.get("gpu_load") or {}
    if not gpu:
        return "-"
    parts = [f"{gpu.get('index', '')} {gpu.get('name', '')}".strip() or gpu["uuid"]]
    if load.get("memory_used") is not None:
        parts.append(f"{format_bytes(load['memory_used'])} of {format_bytes(gpu.get('memory', 0))}")
    if load.get("utilisation") is not None:
        parts.append(f"{load['utilisation']} %")
    if load.get("temperature") is not None:
        parts.append(f"{load['temperature']} C")
    parts += load.get("throttled", ())
    parts += [text for text in ("slow link" if gpu.get("slow_link") else "", gpu.get("problem", "")) if text]
    return ", ".join(parts)


def format_forecast_ratio(record: Mapping[str, Any]) -> str:
    """Returns the ratio of observed to forecast pass durations as text.

    It is `-` if there is no ratio yet. Without a performance model it is the progress of measuring the model, or `no
    model`.
    """
    from cluster.model_check import is_off

    ratio = record.get("forecast_ratio")
    if ratio is not None:
        return f"{ratio:.2f}, off" if is_off(ratio) else f"{ratio:.2f}"
    if record.get("performance"):
        return "-"
    measuring = record.get("measuring")
    return "no model" if measuring is None else f"measuring, {measuring:.0%}"


def adapters(service: Service, output: TableOutput, node: Node) -> None:
    """List a node's adapters, their tiers, and the progress of those that are loading."""
    from garnish.calls import node_adapters_call
    from gateway.routes.nodes import NodeAdapters

    screen = output.screen()
    with service.client(admin=True) as client:
        reply = client.ask(node_adapters_call(node), NodeAdapters)
    rows = [
        [
            entry.digest,
            entry.tier,
            str(max(entry.ranks)) if entry.ranks else "-",
            format_bytes(entry.bytes),
            str(entry.in_use),
            str(entry.waiting),
            _progress(entry.layers),
        ]
        for entry in reply.adapters
    ]
    screen.table(
        [
            Column("DIGEST", min_width=16, cut=True),
            Column("TIER"),
            Column("RANK", number=True),
            Column("SIZE", number=True),
            Column("IN USE", number=True),
            Column("WAITING", number=True),
            Column("LOADING", min_width=16),
        ],
        rows,
    )
    if reply.unnamed:
        screen.notice(f"{reply.unnamed} more are on the disk")
    screen.result(reply)


def _progress(layers: Sequence[str] | None) -> str:
    """Returns the number of layers in each state as text, such as `3 device, 1 host, 4 no`.

    It is `-` if `layers` is None or empty.
    """
    if layers is None:
        return "-"
    return ", ".join(f"{layers.count(state)} {state}" for state in dict.fromkeys(layers))


def prefetch(
    service: TenantService, output: Output, node: Node, function: Function = None, digest: Digest = None
) -> None:
    """Load an adapter to a node's device, or to its host memory if the device is in use."""
    _move("prefetch", node, function, digest, service, output.screen())


def evict(service: TenantService, output: Output, node: Node, function: Function = None, digest: Digest = None) -> None:
    """Remove an adapter from a node's device, host memory and disk. Refused while the adapter is in use."""
    _move("evict", node, function, digest, service, output.screen())


def _move(
    action: str, node: str, function: str | None, digest: str | None, service: TenantService, screen: Screen
) -> None:
    from garnish.calls import move_call
    from gateway.routes.nodes import MovedReply

    if (function is None) == (digest is None):
        raise typer.BadParameter("expected a function, or --digest")
    with service.client(service.tenant or _first_tenant(function, service), admin=True) as client:
        moved = client.ask(move_call(node, action, function, digest), MovedReply)
    where = f"now {moved.tier}" if moved.tier is not None else "still loading"
    screen.line(f"{moved.digest} on {moved.node}: {where}")
    screen.result(moved)


def _first_tenant(function: str | None, service: Service) -> str | None:
    """Returns the default tenant for a `function`: the first one in the state's credentials.

    Returns None if `function` is None, if a URL is given, or if the state has no credentials.
    """
    from garnish.credentials import FILE_NAME, read_credentials

    if function is None or service.url is not None or "GARNISH_URL" in os.environ:
        return None
    credentials = read_credentials(service.state / FILE_NAME)
    return credentials.tenant if credentials is not None else None


def drain(service: Service, output: Output, node: Node) -> None:
    """Drain a node: it gets no new requests, and its running ones finish."""
    _set_draining(node, True, service, output.screen())


def undrain(service: Service, output: Output, node: Node) -> None:
    """Give a node requests again."""
    _set_draining(node, False, service, output.screen())


def _set_draining(node: str, draining: bool, service: Service, screen: Screen) -> None:
    from garnish.calls import drain_call
    from gateway.routes.nodes import NodeItem

    with service.client(admin=True) as client:
        node_item = client.ask(drain_call(node, draining), NodeItem)
    open_requests = node_item.record["running"] + node_item.record["queued"]
    screen.line(f"{node}: {node_item.record['state']}, {open_requests} requests open")
    screen.result(node_item)


group = commands(
    {
        "list": list_nodes,
        "adapters": adapters,
        "prefetch": prefetch,
        "evict": evict,
        "drain": drain,
        "undrain": undrain,
    },
    name="nodes",
    help="The nodes: list them, see their adapters, drain them.",
    invoke_without_command=True,
    callback=flat(list_by_default),
)
