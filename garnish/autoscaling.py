"""`garnish autoscale`: reads the load from the gateway in rounds, and scales the pools while it holds a lease."""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType

import msgspec

from garnish.calls import lease_call, pools_call
from garnish.client import Client, admin_client
from garnish.config import ServiceFile, load_service_file
from garnish.drain import gpu_fault, known_nodes, open_requests, set_draining
from garnish.errors import FrontDoorError, GarnishError
from garnish.node_pools import infra_directory, stack_of
from garnish.provision import Provision, infra_errors_as_cli_errors, unchanged
from gateway.routes import pools as pool_routes
from infra.autoscale.driver import PoolDriver
from infra.autoscale.local import LocalDriver
from infra.autoscale.rounds import Autoscaler, LoadSnapshot, LoadUnknown, PoolView, RoundResult, ScaledPool
from infra.autoscale.sizing import Load, Targets
from infra.errors import InfraError, Interrupted, raised_as
from infra.instances import devices_of
from infra.processes import NodeKey, running_nodes
from infra.stack import Stack, check_stack, node_ids

ROUND_SECONDS = 2.0
LEASE_SECONDS = 15.0
RENEW_SECONDS = 4.0
Report = Callable[[RoundResult], None]


class LeaseKeeper:
    """Renews the autoscaler's lease in a separate thread, since a change of a pool may take minutes."""

    def __init__(self, state: Path) -> None:
        self.holder = (
            f"{re.sub('[^A-Za-z0-9.-]', '-', socket.gethostname())[:100]}:{os.getpid()}:{secrets.token_hex(3)}"
        )
        self._state = state
        self._ends = -float("inf")
        self._why = "the lease was not requested yet"
        self._has_answer, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._renew_lease_until_ended, name="lease", daemon=True)

    def trouble(self) -> str | None:
        """Returns the reason why this process may not scale pools, or None while it holds the lease.

        This process's clock decides when the lease ends, counted from before the request was sent.
        """
        return None if time.monotonic() < self._ends else self._why

    @contextmanager
    def running(self) -> Iterator[None]:
        """Holds the lease while the context runs, and releases it at the end.

        The context is entered after the first reply or failure of a request, or after LEASE_SECONDS.
        """
        self._thread.start()
        self._has_answer.wait(LEASE_SECONDS)
        try:
            yield
        finally:
            self._ended.set()
            self._thread.join(LEASE_SECONDS)

    def _renew_lease_until_ended(self) -> None:
        """Renews the lease every RENEW_SECONDS until `running` ends, and then releases it."""
        with admin_client(self._state) as client:
            while not self._ended.is_set():
                self._request(client, LEASE_SECONDS)
                self._has_answer.set()
                self._ended.wait(RENEW_SECONDS)
            self._request(client, 0.0)

    def _request(self, client: Client, seconds: float) -> None:
        began = time.monotonic()
        try:
            reply = client.ask(lease_call(self.holder, seconds), pool_routes.LeaseReply)
        except GarnishError as error:  # a lease granted earlier stays valid until its end
            self._why = f"the lease can't be acquired: {error}"
            return
        if reply.holder == self.holder:
            self._ends, self._why = began + reply.seconds, "the lease has run out"
        else:
            self._ends, self._why = -float("inf"), f"the autoscaler {reply.holder} leads"


def autoscale(file: Path, state: Path, report: Report, *, once: bool = False) -> bool:
    """Scales the pools until INT or TERM arrives; with `once` for one round.

    `report` is called with each result. With `once` it returns False if a pool could not be scaled (`held`); else it
    returns True. Raises FrontDoorError.
    """
    service, keeper = load_service_file(file), LeaseKeeper(state)
    if not service.node_pools:
        raise FrontDoorError(f"{file}: there are no node_pools to scale")
    with infra_errors_as_cli_errors():
        check_stack(stack_of(service, state.absolute()))
    with (
        infra_errors_as_cli_errors(),
        _stop_on_signals() as stop,
        admin_client(state) as client,
        keeper.running(),
    ):
        nodes_each = {name: _nodes_each(service, name) for name in service.node_pools}
        scaler = Autoscaler(
            _pools(service, file, state), lambda: read_snapshot(client, nodes_each), keeper.trouble, time.monotonic
        )
        while not stop.is_set():
            try:
                decided = scaler.round(once=once)
            except Interrupted:
                break
            for entry in decided:
                report(entry)
            if once:
                return all(entry.action != "held" for entry in decided)
            stop.wait(ROUND_SECONDS)
    return True


def read_snapshot(client: Client, nodes_each: dict[str, int]) -> LoadSnapshot:
    """Returns the pools' loads and numbers of ready nodes, read from the gateway.

    `nodes_each` has the nodes per unit of each pool. Raises LoadUnknown.
    """
    try:
        reply = client.ask(pools_call(), pool_routes.PoolList)
    except GarnishError as error:
        raise LoadUnknown(f"the gateway does not report the load: {error}") from error
    if reply.stale is not None:
        raise LoadUnknown("Redis is away, and what the gateway knows of the load is not current")
    pools = {
        pool.pool: PoolView(_load(pool, nodes_each[pool.pool]), pool.ready / nodes_each[pool.pool])
        for pool in reply.pools
        if pool.pool in nodes_each
    }
    return LoadSnapshot(pools, _load(reply.unplaced, 1))


def _load(load: pool_routes.Load, each: int) -> Load:
    """Returns the gateway's load with demand and backlog in units of `each` nodes."""
    of_all = msgspec.convert(load, Load, from_attributes=True)
    return msgspec.structs.replace(of_all, demand=of_all.demand / each, backlog=of_all.backlog / each)


def _pools(service: ServiceFile, file: Path, state: Path) -> list[ScaledPool]:
    local, aws = LocalDriver(ThisHost(file, state.absolute()), time.monotonic), _aws_driver(service, state.absolute())
    scaled_pools = []
    for name, pool in service.node_pools.items():
        scaling = pool.scaling
        targets = Targets(
            min=pool.min,
            max=pool.max,
            queue_wait=scaling.queue_wait,
            attainment=scaling.attainment,
            utilisation=scaling.utilisation,
            up_seconds=scaling.up,
            down_seconds=scaling.down,
            scale_to_zero_after=pool.scale_to_zero_after,
        )
        driver = local if pool.backend == "local" else aws
        assert driver is not None
        scaled_pools.append(ScaledPool(name, driver, targets))
    return scaled_pools


def _aws_driver(service: ServiceFile, state: Path) -> PoolDriver | None:
    if all(pool.backend != "aws" for pool in service.node_pools.values()):
        return None
    from infra.autoscale.aws import AwsDriver
    from infra.autoscale.sizes import RecordingDriver

    assert service.infra.aws is not None
    host = ThisHost(service.file, state)
    driver = AwsDriver(service.service, service.infra.aws.region, failed=host.failed)
    return RecordingDriver(driver, host.directory, host.stated)


def _nodes_each(service: ServiceFile, name: str) -> int:
    """Returns the number of nodes per unit of the pool's driver.

    The unit is an instance in AWS, with a node for each GPU that nodes may use; else it is one node.
    """
    pool, devices = service.node_pools[name], service.node.devices
    if pool.backend != "aws":
        return 1
    return len(devices_of(pool.instance_type or "", None if devices == "all" else devices, f"node_pools.{name}"))


@contextmanager
def _stop_on_signals() -> Iterator[threading.Event]:
    """Yields an event, which INT and TERM set while the context runs."""
    stop = threading.Event()

    def request_stop(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    before = {number: signal.signal(number, request_stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class ThisHost:
    """Implements infra.autoscale.local.Host for this host; `state` is an absolute path."""

    def __init__(self, file: Path, state: Path) -> None:
        self._file, self._state = file, state
        with _cli_errors_as_infra_errors():
            self.directory = infra_directory(load_service_file(file), state)

    def stack(self) -> Stack:
        with _cli_errors_as_infra_errors():
            return stack_of(load_service_file(self._file), self._state)

    def stated(self, pool: str) -> int:
        """Returns the pool's current `desired` in the service file.

        Raises InfraError if the service file no longer has the pool.
        """
        with _cli_errors_as_infra_errors():
            entry = load_service_file(self._file).node_pools.get(pool)
        if entry is None:
            raise InfraError(f"node_pools.{pool}: the service file has no such pool any more")
        return entry.desired

    def running(self) -> set[str]:
        stack = self.stack()
        keys = [
            NodeKey(state=str(self._state), service=stack.service, pool=pool.name, node=node)
            for pool in stack.local_pools
            for node in node_ids(pool.name, pool.max)
        ]
        return {key.node for key in running_nodes(self._state, stack.service, keys)}

    def failed(self) -> set[str]:
        with _cli_errors_as_infra_errors(), admin_client(self._state) as client:
            nodes = known_nodes(client).items()
        return {name for name, node in nodes if gpu_fault(node) and not open_requests(node)}

    def open_requests(self) -> Mapping[str, int]:
        with _cli_errors_as_infra_errors(), admin_client(self._state) as client:
            return {name: open_requests(node) for name, node in known_nodes(client).items()}

    def drain(self, node: str, draining: bool) -> None:
        with _cli_errors_as_infra_errors(), admin_client(self._state) as client:
            set_draining(client, node, draining)

    def apply(self) -> None:
        with unchanged():
            provision = Provision(self._file, self._state)
        provision.resize_local_pools(lambda _text: None)


def _cli_errors_as_infra_errors() -> AbstractContextManager[None]:
    """Converts FrontDoorError into InfraError, which drivers may raise, while the context runs."""
    return raised_as(InfraError, FrontDoorError)
