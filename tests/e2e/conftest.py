"""Services over stories260K, in fp32 on the CPU: small enough that a start takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from whole_service import MakeService, Service, service_file

from tests.support.ports import free_port


@pytest.fixture(scope="module")
def make_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeService]:
    """Makes services (not started yet); whatever still runs at the end of the module is stopped."""
    made: list[Service] = []

    def make(
        model: Path,
        functions: dict[str, Any] | None = None,
        tenants: tuple[str, ...] = ("acme", "globex"),
        dtype: str = "float32",
        registry: str | None = None,
    ) -> Service:
        service = Service(tmp_path_factory.mktemp("service"), free_port())
        (service.folder / "serverless.yml").write_text(service_file(model, functions or {}, tenants, dtype, registry))
        made.append(service)
        return service

    yield make
    for service in made:
        if service.process is not None:
            service.stop()


@pytest.fixture(scope="module")
def service(make_service: MakeService, stories_dir: Path, stories_adapters: dict[str, Path]) -> Service:
    """One running service with the function `dragon` of tenant acme, shared by a module's tests."""
    declared = {"dragon": {"tenant": "acme", "adapter": str(stories_adapters["dragon"])}}
    return make_service(stories_dir, declared).start()
