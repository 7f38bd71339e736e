"""What the driver of local pools needs of this host: the service file, nodes' processes, Terraform and the gateway."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from garnish.config import load_service_file
from garnish.drain import gpu_fault, known_nodes, open_requests, set_draining
from garnish.errors import FrontDoorError
from garnish.node_pools import infra_directory, stack_of
from garnish.operate import admin_client
from garnish.provision import Provision, unchanged
from infra.errors import InfraError, raised_as
from infra.local.processes import NodeKey, running_nodes
from infra.stack import Stack, node_ids


class ThisHost:
    """Does what infra.autoscale.local.Host asks of this host; `state` is an absolute path."""

    def __init__(self, file: Path, state: Path) -> None:
        self._file, self._state = file, state
        with _told():
            self.directory = infra_directory(load_service_file(file), state)

    def stack(self) -> Stack:
        with _told():
            return stack_of(load_service_file(self._file), self._state)

    def stated(self, pool: str) -> int:
        """Returns `desired` of the pool in the service file now. Raises InfraError when the file has no such pool any
        more."""
        with _told():
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
        with _told(), admin_client(self._state) as client:
            nodes = known_nodes(client).items()
        return {name for name, node in nodes if gpu_fault(node) and not open_requests(node)}

    def open_requests(self) -> Mapping[str, int]:
        with _told(), admin_client(self._state) as client:
            return {name: open_requests(node) for name, node in known_nodes(client).items()}

    def drain(self, node: str, wanted: bool) -> None:
        with _told(), admin_client(self._state) as client:
            set_draining(client, node, wanted)

    def apply(self) -> None:
        with unchanged():
            provision = Provision(self._file, self._state)
        provision.resize(lambda _text: None)


def _told() -> AbstractContextManager[None]:
    """Raises failures of the front door as InfraError, which the driver tells."""
    return raised_as(InfraError, FrontDoorError)
