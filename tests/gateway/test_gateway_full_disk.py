"""Gateways whose disk fills up or becomes read-only: calls go on, what is to be stored is refused, nothing is lost."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from running_gateway import until
from stub_node import StubNode, echo, hang_before_first, stub_node
from test_gateway_server import PROGRAM, config, node_of, process, wait_for  # noqa: F401  (config is a fixture)

from adapters.local_store import LocalStore
from adapters.tenants import Tenants
from gateway.catalog.store_probe import DISK_FULL, STORE_FULL
from gateway.config import GatewayConfig
from tests.support.redis_server import redis_server
from tests.support.small_disk import SmallDisk, small_disk

SOON = "from gateway.catalog import store_probe\nstore_probe.MIN_WRITE_GAP_S = 0.2\n"
CALL = {"prompt": "x", "max_tokens": 2}
BATCH_LINE = b'{"custom_id": "1", "method": "POST", "url": "/invoke", "body": {"function": "f", "prompt": "x"}}\n'


@dataclass
class Place:
    """A gateway of several workers, whose state is on a small disk."""

    url: str
    child: subprocess.Popen[bytes]
    node: StubNode
    disk: SmallDisk
    in_directory: bool
    """True if the registry is on the disk, too."""

    @property
    def workers(self) -> list[int]:
        pid = self.child.pid
        return sorted(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))

    def get(self, path: str) -> httpx.Response:
        """Over a connection of its own, which any worker may take."""
        return httpx.get(self.url + path, timeout=60, verify=False)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(self.url + path, timeout=60, verify=False, **body)

    def call(self, function: str = "f") -> int:
        return self.post(f"/invoke/{function}", json=CALL).status_code

    def submit(self) -> httpx.Response:
        return self.post("/invoke/f", json={**CALL, "background": True})

    def upload(self) -> httpx.Response:
        files = {"file": ("calls.jsonl", BATCH_LINE), "purpose": (None, "batch")}
        return self.post("/v1/files", files=files)

    def order_batch(self, file_id: str) -> httpx.Response:
        order = {"input_file_id": file_id, "endpoint": "/invoke", "completion_window": "24h"}
        return self.post("/v1/batches", json=order)

    def problems(self) -> dict[str, str]:
        reply = self.get("/readyz")
        assert reply.status_code == 200, reply.text
        return {name: check["problem"] for name, check in reply.json()["checks"].items() if check["problem"]}


@contextmanager
def place(
    config: GatewayConfig,  # noqa: F811
    folder: Path,
    kind: str,
    workers: int,
    s3: str | None,
) -> Iterator[Place]:
    with ExitStack() as stack:
        disk = stack.enter_context(small_disk(folder, "ext4" if kind == "ext4" else "tmpfs", 24))
        changed = msgspec.structs.replace(
            config,
            registry=s3 or str(disk.path / "registry"),
            tmp_dir=str(disk.path / "uploads"),
            workers=workers,
        )
        if workers > 1:
            (folder / "redis").mkdir()
            redis = stack.enter_context(redis_server(folder / "redis"))
            changed = msgspec.structs.replace(changed, redis=redis.url)
        child = stack.enter_context(process(changed, folder / "log", SOON + PROGRAM))
        node = stack.enter_context(stub_node(node_of(config, echo)))
        url = f"http://127.0.0.1:{config.port}"
        wait_for(url, "/healthz", child)
        found = Place(url, child, node, disk, s3 is None)
        until(lambda: len(found.workers) == workers)
        assert node.publish(url).status_code == 204
        until(lambda: found.get("/readyz").status_code == 200)
        yield found


@pytest.fixture(params=[("tmpfs", 1), ("tmpfs", 3), ("ext4", 3), ("s3", 3)], ids=lambda p: f"{p[0]}-{p[1]}")
def there(
    request: pytest.FixtureRequest,
    config: GatewayConfig,  # noqa: F811
    tmp_path: Path,
    pirate: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Place]:
    kind, workers = request.param
    s3 = None
    if kind == "s3":
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", request.getfixturevalue("s3_endpoint"))
        s3 = f"s3://garnish-tests/{tmp_path.name}"
    with place(config, tmp_path, kind, workers, s3) as found:
        assert found.post("/deploy/f", files=pirate).status_code == 201
        assert {found.call() for _ in range(10)} == {200}
        yield found


def refused(reply: httpx.Response) -> None:
    assert reply.status_code == 507, reply.text
    error = reply.json()["error"]
    assert (error.get("code") or error["type"]) == "insufficient_storage"
    assert "nothing of this request was stored" in error["message"]
    assert "operator" in error["message"]
    assert int(reply.headers["retry-after"]) >= 1


def a_worker_is_replaced(there: Place) -> None:
    """One that dies while the disk takes nothing."""
    before = there.workers
    os.kill(before[0], signal.SIGKILL)
    until(lambda: len(there.workers) == len(before) and before[0] not in there.workers)
    wait_for(there.url, "/healthz", there.child)
    until(lambda: there.node.publish(there.url).status_code == 204)
    until(lambda: {there.call() for _ in range(5)} == {200})


def test_a_disk_that_fills_up(there: Place, pirate: dict[str, Any]) -> None:
    there.node.script = hang_before_first
    acknowledged = [there.submit().raise_for_status().json()["id"] for _ in range(6)]
    file_id = there.upload().raise_for_status().json()["id"]
    until(lambda: len(there.node.received) > 10)  # some run
    before = there.workers
    there.disk.fill()
    there.node.script = echo
    there.node.go_on.set()

    # Calls that store nothing go on, in every worker, with metrics of names that are new.
    assert {there.call() for _ in range(40)} == {200}
    assert {there.call(f"none-{number}") for number in range(100)} == {404}
    assert {there.get(path).status_code for path in ("/healthz", "/readyz", "/metrics", "/functions") * 5} == {200}
    assert there.workers == before

    # What is to be stored is refused.
    refused(there.post("/deploy/g", files=pirate))
    expected = {"store": STORE_FULL, "disk": DISK_FULL} if there.in_directory else {"disk": DISK_FULL}
    until(lambda: there.problems() == expected)
    if there.in_directory:
        refused(there.submit())
        refused(there.upload())
        refused(there.order_batch(file_id))
    else:
        acknowledged.append(there.submit().raise_for_status().json()["id"])
        assert there.upload().status_code == 200
        assert there.order_batch(file_id).status_code == 200

    # What was acknowledged is done when there is room.
    there.disk.free()
    until(lambda: there.problems() == {})
    assert there.post("/deploy/g", files=pirate).status_code == 201
    for event_id in acknowledged:
        until(lambda event_id=event_id: there.get(f"/invocations/{event_id}").json().get("ended"))  # type: ignore[misc]
        assert there.get(f"/invocations/{event_id}").json()["state"] == "succeeded"


def test_a_worker_that_dies_while_the_disk_is_full_is_replaced(there: Place) -> None:
    there.disk.fill()
    a_worker_is_replaced(there)
    there.disk.free()
    until(lambda: there.problems() == {})


def test_a_read_only_disk(there: Place, pirate: dict[str, Any]) -> None:
    before = there.workers
    with there.disk.read_only():
        assert {there.call() for _ in range(20)} == {200}
        refused(there.post("/deploy/g", files=pirate))
        if there.in_directory:
            refused(there.submit())
            refused(there.upload())
        until(lambda: "disk" in there.problems())
        assert there.problems().get("store") == (STORE_FULL if there.in_directory else None)
        assert there.workers == before
        a_worker_is_replaced(there)
    until(lambda: there.problems() == {})
    assert there.post("/deploy/g", files=pirate).status_code == 201


CHANGES: dict[str, dict[str, Any]] = {
    "POST /deploy/g": {"files": None},
    "PATCH /functions/f": {"json": {"retries": 2}},
    "DELETE /functions/f": {},
    "PUT /functions/f/aliases/prod": {"json": {"version": 1}},
    "POST /invoke/f": {"json": {**CALL, "background": True}},
    "POST /v1/files": {"files": {"file": ("calls.jsonl", BATCH_LINE), "purpose": (None, "batch")}},
    "PUT /tenants/globex": {"json": {}},
    "POST /tenants/default/keys": {},
    "POST /tenants/default/webhook-secrets": {},
}
"""Requests that store something, with the arguments of httpx."""


def test_every_change_is_refused_on_a_full_disk(
    config: GatewayConfig,  # noqa: F811
    tmp_path: Path,
    pirate: dict[str, Any],
) -> None:
    with place(config, tmp_path, "tmpfs", 1, None) as there:
        Tenants(LocalStore(there.disk.path / "registry")).put("default")
        assert there.post("/deploy/f", files=pirate).status_code == 201
        file_id = there.upload().raise_for_status().json()["id"]
        order = {"input_file_id": file_id, "endpoint": "/invoke", "completion_window": "24h"}
        there.disk.fill()
        for target, arguments in (CHANGES | {"POST /v1/batches": {"json": order}}).items():
            method, path = target.split(" ")
            body = {"files": pirate} if target.startswith("POST /deploy") else arguments
            reply = httpx.request(method, there.url + path, timeout=60, verify=False, **body)
            assert reply.status_code == 507, (target, reply.text)
            refused(reply)


def half_a_deploy(there: Place, name: str) -> socket.socket:
    """Returns the connection of an upload whose folder exists, and whose body lacks its end."""
    raw = socket.create_connection(("127.0.0.1", int(there.url.rpartition(":")[2])), timeout=60)
    part = b'--b\r\ncontent-disposition: form-data; name="adapter_model.safetensors"; filename="x"\r\n\r\n'
    head = f"POST /deploy/{name} HTTP/1.1\r\nhost: localhost\r\ncontent-type: multipart/form-data; boundary=b\r\n"
    raw.sendall(f"{head}content-length: {len(part) + 1007}\r\n\r\n".encode() + part + bytes(500))
    until(lambda: any((there.disk.path / "uploads").iterdir()))
    return raw


def test_a_disk_that_becomes_read_only_by_an_error(
    config: GatewayConfig,  # noqa: F811
    tmp_path: Path,
    pirate: dict[str, Any],
) -> None:
    """In the middle of an upload; ext4 does so with `errors=remount-ro`, the default of many hosts."""
    with place(config, tmp_path, "ext4", 3, None) as there:
        assert there.post("/deploy/f", files=pirate).status_code == 201
        assert {there.call() for _ in range(10)} == {200}
        before = there.workers
        with half_a_deploy(there, "g") as raw:
            there.disk.abort()
            raw.sendall(bytes(500) + b"\r\n--b--")
            assert raw.recv(65536).startswith(b"HTTP/1.1 507 ")
        assert {there.call() for _ in range(20)} == {200}
        for reply in (there.post("/deploy/g", files=pirate), there.submit(), there.upload()):
            refused(reply)
        until(lambda: there.problems() == {"store": STORE_FULL, "disk": DISK_FULL})
        assert there.workers == before
        a_worker_is_replaced(there)
    assert '"message": "request failed"' not in (tmp_path / "log").read_text()


def test_workers_map_no_file_that_a_disk_may_lack(there: Place) -> None:
    """Whoever writes into one dies when there is no room for its page."""
    for pid in (there.child.pid, *there.workers):
        lines = [line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
        mapped = {line[5] for line in lines if line[1] == "rw-s" and len(line) == 6}
        assert all(name.startswith(("/dev/zero", "/memfd:", "anon_inode:")) for name in mapped), mapped
