"""`garnish up`, `gateway` and `node`, which serve, and `garnish logs`, which shows the logs."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Annotated

import typer

from garnish.cli.options import DEFAULT_FILE, DEFAULT_STATE, File, HostNodes, Output, State
from garnish.screen import Screen

Host = Annotated[str | None, typer.Option("--host", help="Listen here instead of the file's gateway.host.")]
Port = Annotated[int | None, typer.Option("--port", min=1, max=65535, help="Instead of the file's gateway.port.")]
Process = Annotated[str | None, typer.Argument(help="gateway, or a node's id (default: all).")]
Lines = Annotated[int, typer.Option("-n", "--lines", min=1, max=1_000_000, help="The last lines of each.")]
AsTrace = Annotated[bool, typer.Option("--trace", help="The calls that ended well, as a trace for `garnish simulate`.")]


def up(
    output: Output,
    file: File = DEFAULT_FILE,
    state: State = DEFAULT_STATE,
    host: Host = None,
    port: Port = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", min=1, max=64, help="Nodes on this host (default: one per GPU, or one).")
    ] = None,
    stop_seconds: Annotated[
        int | None,
        typer.Option("--stop-seconds", min=1, max=3600, help="Time for open calls to finish at the end (default: 25)."),
    ] = None,
) -> None:
    """Serve on this host until Ctrl-C: a gateway, its nodes and the functions of the service file."""
    from garnish.settings import UP_STOP_SECONDS
    from garnish.up.prepare import UpOptions
    from garnish.up.run import up as serve_all

    seconds = UP_STOP_SECONDS if stop_seconds is None else stop_seconds
    options = UpOptions(file=file, state=state, host=host, port=port, nodes=nodes, stop_seconds=seconds)
    raise typer.Exit(serve_all(options, output.screen()))


def gateway(file: File = DEFAULT_FILE, state: State = DEFAULT_STATE, host: Host = None, port: Port = None) -> None:
    """Run the gateway without nodes; start nodes with `garnish node`."""
    from garnish.base_check import check_base
    from garnish.base_manifests import try_manifest
    from garnish.config import load_service_file
    from garnish.settings import gateway_config, resolve_base
    from garnish.up.greeting import show_keys
    from garnish.up.prepare import check_port, check_shared, local_url, make_keys, state_directory
    from gateway.server import run

    service = load_service_file(file)
    with state_directory(state) as directory:
        base = resolve_base(service)
        check_base(base.directory, service.node.engine)  # the gateway logs its warning
        config = gateway_config(service, base, directory, host=host, port=port)
        check_port(config.host, config.port)
        check_shared(config)
        if service.node.engine == "vllm":
            try_manifest(service, base, directory)
        show_keys(directory, *make_keys(service, directory, local_url(config.host, config.port)), Screen())
        run(config)


def node(
    gateway_url: Annotated[str, typer.Option("--gateway", help="The gateway's address, as this host reaches it.")],
    file: File = DEFAULT_FILE,
    state: State = DEFAULT_STATE,
    secret_file: Annotated[Path | None, typer.Option("--secret-file", help="The cluster secret's file.")] = None,
    node_id: Annotated[str | None, typer.Option("--node-id", help="Its name (default: the host's name).")] = None,
    host: Annotated[str, typer.Option("--host", help="Listen here; the gateway must reach it.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any free port.")] = 0,
    host_nodes: HostNodes = None,
    pool: Annotated[str, typer.Option("--pool", help="The node pool that it belongs to.")] = "",
) -> None:
    """Run one node, which reports to a gateway."""
    from garnish.base_check import check_base
    from garnish.config import load_service_file
    from garnish.settings import SERVICE_STOP_SECONDS, node_config, resolve_base
    from garnish.up.prepare import check_secret
    from node_agent.supervisor import run

    service = load_service_file(file)
    base = resolve_base(service)
    check_base(base.directory, service.node.engine)
    config = node_config(
        service,
        base,
        state.absolute(),
        node_id=node_id or socket.gethostname(),
        gateway_url=gateway_url,
        secret_file=secret_file,
        host=host,
        port=port,
        host_nodes=host_nodes or 1,
        stop_seconds=SERVICE_STOP_SECONDS,
        pool=pool,
    )
    check_secret(Path(config.secret_file))
    raise typer.Exit(run(config))


def logs(
    output: Output, process: Process = None, lines: Lines = 50, trace: AsTrace = False, state: State = DEFAULT_STATE
) -> None:
    """Show the logs in the state directory, or export a trace of all calls in the logs.

    On a terminal lines are formatted for reading. Otherwise, or with GARNISH_LOG=json, they are printed as logged.

    In the trace tenants are named t1, t2, ..., and adapters by the beginning of their digests. It has no prompts and no
    answers.
    """
    from cluster.logs import wants_text
    from garnish.logs import for_people, last_lines, log_names, trace_lines

    screen = output.screen()
    if trace:
        if process is not None:
            raise typer.BadParameter("--trace is made of the gateway's log: name no process")
        requests = list(trace_lines(state))
        if screen.as_json:
            screen.result(requests)
        else:
            for request in requests:
                screen.piece(request.line())
        return
    names = [process] if process is not None else log_names(state)
    log_lines = {name: last_lines(state, name, lines) for name in names}
    show = for_people if wants_text(sys.stdout) else str
    for name, texts in log_lines.items():
        for text in texts:
            screen.styled(f"{name}\t{show(text)}" if process is None else show(text))
    screen.result(log_lines)
