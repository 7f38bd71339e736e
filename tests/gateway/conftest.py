"""A real gateway over a real registry and base model; only the nodes are stand-ins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from command_line import CommandLine, running_command_line
from running_gateway import Running, as_new, plain_client, start_gateway, upload


@pytest.fixture
def start(stories_dir: Path, tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """start(**config) -> a gateway whose nodes' records never expire within a test."""
    with ExitStack() as stack:
        yield lambda **changed: start_gateway(stack, stories_dir, tmp_path, **changed)


@pytest.fixture(scope="module")
def shared_gateway(stories_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A gateway with one echoing node for all tests of a module: each leaves it as it likes, and relies on nothing."""
    with ExitStack() as stack:
        running = start_gateway(stack, stories_dir, tmp_path_factory.mktemp("gateway"))
        running.node()
        yield running


@pytest.fixture
def deployed(shared_gateway: Running, pirate: dict[str, Any]) -> Running:
    """The module's gateway with the function `pirate` as it is after its first deploy."""
    with plain_client(shared_gateway.url) as client:
        client.headers["authorization"] = f"Bearer {shared_gateway.keys['acme']}"
        assert client.delete("/functions/pirate", params={"force": "true"}).status_code in (204, 404)
        assert client.post("/deploy/pirate", files=pirate).status_code == 201
    return shared_gateway


@pytest.fixture
def reused(shared_gateway: Running) -> Iterator[Running]:
    """The module's gateway as a new one, but for the counts of its metrics and the names of its tenants."""
    with as_new(shared_gateway) as running:
        yield running


@pytest.fixture
def bare(shared_gateway: Running) -> Iterator[Running]:
    """The same without nodes that may serve."""
    with as_new(shared_gateway, with_node=False) as running:
        yield running


@pytest.fixture
def gateway(start: Callable[..., Running]) -> Running:
    """A gateway with one echoing node."""
    running = start()
    running.node()
    return running


@pytest.fixture(scope="session")
def command_line() -> Iterator[CommandLine]:
    with running_command_line() as made:
        yield made


@pytest.fixture
def pirate(stories_adapters: dict[str, Path]) -> dict[str, Any]:
    """Multipart files of a real adapter of stories260K, as httpx takes them."""
    return upload(stories_adapters["pirate"])
