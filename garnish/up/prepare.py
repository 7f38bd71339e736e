"""Checks the settings and creates the keys of `garnish up`, before the first process starts."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from adapters.errors import AdapterError, NotFound
from adapters.open_store import open_checked_store
from adapters.slo import Slo
from adapters.tenants import FILE_BYTES, Limits, Tenants
from cluster.redis_link import RedisAway, check_redis
from cluster.secret import SecretError, create_secret, read_secret
from garnish.base_check import check_base
from garnish.base_manifests import ensure_manifest
from garnish.config import OPEN_TENANT, ServiceFile, load_service_file, tenant_names, tenant_of
from garnish.credentials import (
    FILE_NAME,
    Connection,
    Credentials,
    adopt_keys,
    prepare_keys,
    read_credentials,
    read_operator_keys,
    write_credentials,
)
from garnish.errors import GarnishError, StartError
from garnish.places import path_problem
from garnish.service_file import Tenant
from garnish.settings import (
    UP_STOP_SECONDS,
    Base,
    gateway_config,
    node_config,
    registry_of,
    resolve_base,
    secret_file_of,
    vllm_config,
)
from gateway.config import GatewayConfig
from node_agent.config import NodeConfig
from node_agent.gpu.claim import needed_gpus, node_gpus
from node_agent.gpu.devices import NoGpu

MAX_NODES = 64


class UpOptions(msgspec.Struct, frozen=True, kw_only=True):
    file: Path
    state: Path
    host: str | None = None
    port: int | None = None
    nodes: int | None = None
    """number of nodes; None means one for each GPU, or one if there are no GPUs"""
    stop_seconds: float = UP_STOP_SECONDS


class Deployment(msgspec.Struct, frozen=True):
    """Arguments of the deploy of one entry of `functions:` in the service file."""

    name: str
    directory: Path
    alias: str | None
    policy: dict[str, Any]
    connection: Connection


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    service: ServiceFile
    base: Base
    state: Path
    url: str
    gateway: GatewayConfig
    nodes: tuple[NodeConfig, ...]
    credentials: Credentials
    new_keys: dict[str, str]
    deployments: tuple[Deployment, ...]
    warning: str
    """Text about a part of the service that will refuse calls; empty if there is none."""


@contextmanager
def state_directory(state: Path) -> Iterator[Path]:
    """Yields the directory (mode 0700), locked by this process. Raises StartError if that fails."""
    if problem := path_problem(str(state)):
        raise StartError(f"--state: {problem}")
    state = state.absolute()
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        state.chmod(0o700)
        lock = os.open(state / "up.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StartError(f"the state directory {state} can't be used: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield state
    except BlockingIOError:
        raise StartError(
            f"another `garnish up` or `garnish gateway` uses the state directory {state}; stop it, or name another "
            "directory with --state"
        ) from None
    finally:
        os.close(lock)


def prepare(options: UpOptions, state: Path) -> Prepared:
    """Reads and checks everything that the service needs, and returns it. Nothing is started.

    Raises FrontDoorError.
    """
    service = load_service_file(options.file)
    base = resolve_base(service)
    warning = check_base(base.directory, service.node.engine)
    gateway = gateway_config(
        service, base, state, host=options.host, port=options.port, shutdown_seconds=options.stop_seconds
    )
    url = local_url(gateway.host, gateway.port)
    folders = _adapter_folders(service)
    check_port(gateway.host, gateway.port)
    check_shared(gateway)
    ensure_manifest(service, base, state)
    count = node_count(service, options.nodes)
    credentials, new_keys = make_keys(service, state, url)
    return Prepared(
        service=service,
        base=base,
        state=state,
        url=url,
        gateway=gateway,
        nodes=tuple(
            node_config(
                service,
                base,
                state,
                node_id=f"node-{number}",
                gateway_url=url,
                host_nodes=count,
                stop_seconds=options.stop_seconds,
            )
            for number in range(1, count + 1)
        ),
        credentials=credentials,
        new_keys=new_keys,
        deployments=tuple(_deployments(service, folders, credentials)),
        warning=warning,
    )


def node_count(service: ServiceFile, requested: int | None) -> int:
    """Returns the number of nodes to start on this host.

    It is `requested`, or by default as many as the GPUs that nodes may use suffice for. Without GPUs any number may be
    requested, and the default is one. Raises StartError.
    """
    devices = service.node.devices
    needed = needed_gpus(service.node.engine, vllm_config(service).arguments)
    try:
        gpus = len(node_gpus(service.node.device, None if devices == "all" else devices))
    except NoGpu as error:
        raise StartError(str(error)) from None
    if 0 < gpus < needed:
        raise StartError(f"node.vllm: a node needs {needed} GPUs, and nodes may have {gpus} GPUs of this host")
    if requested is not None and 0 < gpus < requested * needed:
        each = "a GPU takes one node" if needed == 1 else f"a node needs {needed}"
        raise StartError(f"--nodes {requested}: nodes may have {gpus} GPUs of this host, and {each}")
    return requested or gpus // needed or 1


def make_keys(service: ServiceFile, state: Path, url: str) -> tuple[Credentials, dict[str, str]]:
    """Creates the cluster secret, the tenants and their keys if they are missing, and writes the credentials file.

    Returns the credentials, and the new keys by owner. Raises StartError.
    """
    file = state / FILE_NAME
    names = tenant_names(service)
    try:
        create_secret(secret_file_of(service, state))
        tenants = Tenants(open_checked_store(registry_of(service, state)))
        credentials_before = read_credentials(file)
        declare_tenants(tenants, service, before=credentials_before.keys if credentials_before else ())
        if service.auth == "none":
            credentials, new_keys = Credentials(url=url, tenant=names[0]), dict[str, str]()
        else:
            if service.gateway.credentials_file is not None:
                chosen = read_operator_keys(service.path(service.gateway.credentials_file))
                credentials_before = adopt_keys(tenants, names, chosen, credentials_before)
            credentials, new_keys = prepare_keys(tenants, names, credentials_before, url)
        write_credentials(file, credentials)
    except (SecretError, AdapterError, OSError) as error:
        raise StartError(str(error)) from error
    return credentials, new_keys


def declare_tenants(tenants: Tenants, service: ServiceFile, before: Iterable[str]) -> None:
    """Writes the service file's tenants to the registry, as declared tenants.

    `before` has the names of the tenants that were declared so far. Those that the file no longer names are marked as
    not declared, so that the API can change them again.
    """
    names = {*tenant_names(service), *([OPEN_TENANT] if service.auth == "none" else [])}
    for name in names:
        written = service.tenants.get(name) or Tenant()
        tenants.put(
            name,
            declared=True,
            limits=written.limits or Limits(),
            slo=written.slo or Slo(),
            weight=1.0 if written.weight is None else written.weight,
            webhook_hosts=tuple(written.webhook_hosts or ()),
            file_bytes=written.file_bytes or FILE_BYTES,
        )
    for name in set(before) - names:
        with suppress(NotFound):  # the credentials were made for another registry
            tenants.get(name)
            tenants.put(name, declared=False)


def check_shared(config: GatewayConfig) -> None:
    """Raises StartError if the gateway's Redis does not answer."""
    if config.redis is not None:
        try:
            check_redis(config.redis)
        except RedisAway as error:
            raise StartError(
                f"gateway.redis: {error}; start it, or leave the key out to serve with one worker"
            ) from None


def check_secret(file: Path) -> None:
    """Raises StartError if the cluster secret's `file` can't be used."""
    try:
        read_secret(file)
    except SecretError as error:
        raise StartError(
            f"{error}; copy the gateway's (in its state directory), and name it with --secret-file"
        ) from None


def _deployments(service: ServiceFile, folders: dict[str, Path], credentials: Credentials) -> Iterator[Deployment]:
    for name, function in service.functions.items():
        tenant = tenant_of(service, function)
        connection = Connection(credentials.url, credentials.keys.get(tenant, ""), tenant)
        yield Deployment(name, folders[name], function.alias, function.policy(), connection)


def _adapter_folders(service: ServiceFile) -> dict[str, Path]:
    """Returns the adapter folders of the declared functions by name. Adapters on the Hub are downloaded.

    Raises StartError.
    """
    folders = {}
    for name in service.functions:
        try:
            folders[name] = service.adapter_files(name).config.parent
        except GarnishError as error:
            raise StartError(f"{service.file}: functions.{name}.adapter: {error.message}") from None
    return folders


def local_url(host: str, port: int) -> str:
    """Returns the URL at which processes on this host reach a server that listens on `host`."""
    if host in ("0.0.0.0", "::"):  # noqa: S104  (a comparison: nothing is bound here)
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"  # noqa: S104
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def check_port(host: str, port: int) -> None:
    """Raises StartError if no server can listen on this host and port."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise StartError(
                f"port {port} on {host} is in use; stop the other program or choose one with --port"
            ) from None
        raise StartError(f"can't listen on {host}:{port}: {error.strerror or error}") from None
