"""A real gateway over a real registry and base model; only the nodes are stand-ins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from running_gateway import Running, upload
from served_app import served

from adapters.base_model import load_base_model
from adapters.local_store import LocalStore
from adapters.tenants import Tenants
from cluster.secret import create_secret
from gateway.app import create_app
from gateway.config import GatewayConfig


@pytest.fixture
def start(stories_dir: Path, tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """start(**config) -> a gateway whose nodes' records never expire within a test."""
    with ExitStack() as stack:

        def begin(**changed: Any) -> Running:
            store = LocalStore(tmp_path / "registry")
            tenants = Tenants(store)
            keys = {"admin": tenants.add_admin_key()[0]}
            for tenant in ("acme", "other"):
                tenants.put(tenant)
                keys[tenant] = tenants.add_key(tenant)[0]
            secret_file = tmp_path / "secret" / "cluster.secret"
            secret = create_secret(secret_file)
            config = GatewayConfig(
                model_dir=str(stories_dir),
                base_id="stories260K",
                registry=str(tmp_path / "registry"),
                secret_file=str(secret_file),
                tmp_dir=str(tmp_path / "uploads"),
                record_expiry=600.0,
                node_silence=600.0,
            )
            config = msgspec.structs.replace(config, **changed)
            running = Running(config, load_base_model(stories_dir, "stories260K"), secret, keys, stack)
            running.url = stack.enter_context(served(create_app(config)))
            return running

        yield begin


@pytest.fixture
def gateway(start: Callable[..., Running]) -> Running:
    """A gateway with one echoing node."""
    running = start()
    running.node()
    return running


@pytest.fixture
def pirate(stories_adapters: dict[str, Path]) -> dict[str, Any]:
    """Multipart files of a real adapter of stories260K, as httpx takes them."""
    return upload(stories_adapters["pirate"])
