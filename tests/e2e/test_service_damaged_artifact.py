"""A serving artifact is damaged in the registry: calls name it, and it is made again from the adapter's files."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from whole_service import MakeService, Service, eventually

from adapters.artifact import artifact_key
from adapters.blobs import blob_key
from adapters.local_store import LocalStore
from adapters.peft_config import CONFIG_FILE, WEIGHTS_FILE
from adapters.validate import file_sha256

GREEDY = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}
CALLERS = 20


@pytest.fixture(scope="module")
def service(make_service: MakeService, stories_dir: Path, stories_adapters: dict[str, Path]) -> Service:
    """Its node keeps adapters on its disk."""
    made = make_service(stories_dir, {"dragon": {"tenant": "acme", "adapter": str(stories_adapters["dragon"])}})
    file = made.folder / "serverless.yml"
    text = json.loads(file.read_text())
    file.write_text(json.dumps({**text, "node": {**text["node"], "disk_cache": {}}}))
    return made.start()


def deployed(service: Service, name: str, directory: Path) -> str:
    """Its digest."""
    with service.client("acme") as http:
        files = {file: (directory / file).read_bytes() for file in (CONFIG_FILE, WEIGHTS_FILE)}
        return str(http.post(f"/deploy/{name}", files=files).raise_for_status().json()["digest"])


def call(service: Service, name: str) -> httpx.Response:
    with service.client("acme") as http:
        return http.post(f"/invoke/{name}", json=GREEDY)


def served(service: Service, name: str) -> str:
    """What the call says once it succeeds."""
    replies: list[httpx.Response] = []

    def succeeds() -> bool:
        replies.append(call(service, name))
        return replies[-1].status_code == 200

    assert eventually(succeeds, 60), replies[-1].text
    return str(replies[-1].json()["output"]["text"])


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def artifact_of(service: Service, digest: str) -> Path:
    return LocalStore(service.state / "registry").root / artifact_key(service.node()["base"], digest)


def assert_named(reply: httpx.Response, name: str) -> None:
    error: dict[str, Any] = reply.json()["error"]
    told = f"the artifact of version 1 of function {name} was damaged: it is being made again"
    assert (reply.status_code, error["type"], error["message"]) == (503, "unavailable", told)
    assert int(reply.headers["retry-after"]) >= 1


def test_it_is_made_again_once_however_many_call(service: Service, stories_adapters: dict[str, Path]) -> None:
    """Neither what the registry has nor what the node has kept on its disk is what was written."""
    digest = deployed(service, "sunk", stories_adapters["pirate"])
    text, stored = served(service, "sunk"), artifact_of(service, digest)
    whole = stored.read_bytes()
    assert eventually(lambda: bool(list(service.state.rglob(f"{digest}-*")))), "the node keeps it on its disk"
    [kept] = [path for path in service.state.rglob(f"{digest}-*") if path.is_file()]
    os.kill(service.pid_of("node_agent.engine_process"), signal.SIGKILL)  # what it has in memory is whole
    flip(stored, -1)
    flip(kept, -1)
    served(service, "dragon")
    with ThreadPoolExecutor(CALLERS) as threads:
        replies = list(threads.map(lambda _: call(service, "sunk"), range(CALLERS)))
    failed = [reply for reply in replies if reply.status_code != 200]
    assert failed
    for reply in failed:
        assert_named(reply, "sunk")
    assert served(service, "sunk") == text
    assert stored.read_bytes() == whole
    made = [line for log in service.state.glob("logs/*.log") for line in log.read_text().splitlines()]
    assert sum("the artifact of version 1 of acme/sunk is built again" in line for line in made) == 1


def test_when_its_files_are_damaged_too_no_retry_is_promised(
    service: Service, stories_adapters: dict[str, Path]
) -> None:
    digest = deployed(service, "lost", stories_adapters["ocean"])
    text, stored = served(service, "lost"), artifact_of(service, digest)
    with service.client() as admin:
        node = service.node()["id"]
        evicted = lambda: admin.post(f"/nodes/{node}/evict", json={"digest": digest}).status_code == 200  # noqa: E731
        assert eventually(evicted), "it is in use"
    flip(stored, 100)
    flip(
        LocalStore(service.state / "registry").root / blob_key(file_sha256(stories_adapters["ocean"] / WEIGHTS_FILE)),
        -1,
    )
    assert_named(call(service, "lost"), "lost")
    assert eventually(lambda: call(service, "lost").status_code == 500)
    for _ in range(3):
        reply = call(service, "lost")
        told = "the stored files of version 1 of function lost are damaged: deploy the adapter again"
        assert (reply.status_code, reply.json()["error"]["message"]) == (500, told)
        assert "retry-after" not in reply.headers
    assert deployed(service, "lost", stories_adapters["ocean"]) == digest
    assert served(service, "lost") == text
