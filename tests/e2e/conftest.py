"""Services over stories260K, in fp32 on the CPU: small enough that a start takes seconds."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from whole_service import MakeService, Service, eventually, service_file

from tests.support.ports import free_port


@contextmanager
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeService]:
    """Makes services (not started yet); whatever still runs at the end is stopped."""
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

    try:
        yield make
    finally:
        for service in made:
            if service.process is not None:
                service.stop()


@pytest.fixture(scope="module")
def make_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeService]:
    with services(tmp_path_factory) as make:
        yield make


@pytest.fixture(scope="session")
def service(
    tmp_path_factory: pytest.TempPathFactory, stories_dir: Path, stories_adapters: dict[str, Path]
) -> Iterator[Service]:
    """One running service with the function `dragon` of tenant acme, for the tests of all files that kill no part of it
    and delete what they deploy. tests/lanes.py keeps these files in one process."""
    with services(tmp_path_factory) as make:
        declared = {"dragon": {"tenant": "acme", "adapter": str(stories_adapters["dragon"])}}
        running = make(stories_dir, declared).start()
        yield running
        assert running.stop() == 0


@pytest.fixture(scope="session")
def trio(
    tmp_path_factory: pytest.TempPathFactory, stories_dir: Path, stories_adapters: dict[str, Path]
) -> Iterator[Service]:
    """A running service of three nodes, for tests that kill nodes and wait until all are back. Tenant acme has the
    function `dragon`, and `copied`, of which one copy is on a device always."""
    declared = {name: {"tenant": "acme", "adapter": str(stories_adapters["dragon"])} for name in ("dragon", "copied")}
    declared["copied"] |= {"adapter": str(stories_adapters["ocean"]), "provisioned": {"device": 1}}
    with services(tmp_path_factory) as make:
        running = make(stories_dir, declared).start("--nodes", "3")
        yield running
        assert running.stop() == 0


@pytest.fixture
def http(story: Service) -> Iterator[httpx.Client]:
    """Client of the tenant acme of the module's own service, `story`, which holds nothing any more at the end."""
    with story.client("acme") as made:
        yield made
    assert eventually(story.nothing_held), story.node()


@pytest.fixture
def client(story: Service, http: httpx.Client) -> Iterator[openai.OpenAI]:
    key = story.credentials["keys"]["acme"]
    with openai.OpenAI(base_url=f"{story.url}/v1", api_key=key, max_retries=0, timeout=120) as made:
        yield made


@pytest.fixture(scope="session")
def copy_with_template(stories_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Copies stories260K, as the base `story`, with a chat template."""

    def copy(template: str) -> Path:
        model = tmp_path_factory.mktemp("model") / "story"
        shutil.copytree(stories_dir, model)
        (model / "chat_template.jinja").write_text(template)
        return model

    return copy
