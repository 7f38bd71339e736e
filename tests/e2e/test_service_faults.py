"""Killed processes, vanished clients and ends: nothing half-done is visible, nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from pathlib import Path

import httpx
import pytest
from whole_service import MakeService, Service, can_listen, descendants, eventually, is_alive

from adapters.peft_config import CONFIG_FILE, WEIGHTS_FILE

GREEDY = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}
LONG = {**GREEDY, "max_tokens": 450, "ignore_eos": True, "stream": True}
ENGINE = "node_agent.engine_process"


@pytest.fixture(scope="module")
def service(make_service: MakeService, stories_dir: Path, stories_adapters: dict[str, Path]) -> Service:
    """A running service whose parts these tests kill."""
    declared = {"dragon": {"tenant": "acme", "adapter": str(stories_adapters["dragon"])}}
    return make_service(stories_dir, declared).start()


def deploy(service: Service, name: str, directory: Path) -> int:
    with service.client("acme") as http:
        files = {file: (directory / file).read_bytes() for file in (CONFIG_FILE, WEIGHTS_FILE)}
        return http.post(f"/deploy/{name}", files=files).status_code


def gone(processes: dict[int, str]) -> bool:
    return not any(is_alive(pid, command) for pid, command in processes.items())


def stop_amid_a_stream(service: Service, name: str, number: signal.Signals) -> None:
    """The stream ends, with `done` or with an error event, and no process is left."""
    processes = service.processes()
    with service.client("acme") as http, http.stream("POST", f"/invoke/{name}", json=LONG) as reply:
        lines = reply.iter_lines()
        assert next(lines) == "event: token"
        assert service.process is not None
        service.process.send_signal(number)
        assert {"event: done", "event: error"} & set(lines)
    assert service.stop(number) == 0
    assert (service.folder / "err.txt").read_text().endswith("\nstopping\nstopped\n")
    assert eventually(lambda: gone(processes)), processes
    assert can_listen(service.port)


def test_killed_engine_mid_stream(service: Service) -> None:
    """The stream ends with a clear error soon, and the engine comes back."""
    with service.client("acme") as http:
        with http.stream("POST", "/invoke/dragon", json=LONG) as reply:
            lines = reply.iter_lines()
            assert next(lines) == "event: token"
            os.kill(service.pid_of(ENGINE), signal.SIGKILL)
            rest = list(lines)
        assert "event: error" in rest, rest[-5:]
        error = json.loads(rest[rest.index("event: error") + 1].removeprefix("data: "))["error"]
        assert error["type"] == "node_failed"

        assert eventually(lambda: http.post("/invoke/dragon", json=GREEDY).status_code == 200, 60)
    assert eventually(service.nothing_held), service.node()


def test_killed_engine_before_the_reply(service: Service) -> None:
    """A reply that is not a stream is a 5xx in the contract's shape."""
    with service.client("acme") as http:
        request = http.build_request("POST", "/invoke/dragon", json={**LONG, "stream": False})
        with socket.create_connection(("127.0.0.1", service.port), timeout=30) as raw:
            body = request.read()
            head = [f"POST /invoke/dragon HTTP/1.1\r\nhost: x\r\nauthorization: {http.headers['authorization']}\r\n"]
            head += [f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"]
            raw.sendall("".join(head).encode() + body)
            assert eventually(lambda: service.node()["running"] == 1)
            os.kill(service.pid_of(ENGINE), signal.SIGKILL)
            reply = b"".join(iter(lambda: raw.recv(65536), b""))
        assert reply.startswith(b"HTTP/1.1 50"), reply[:200]
        assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["type"] in ("node_failed", "unavailable")
        assert eventually(lambda: http.post("/invoke/dragon", json=GREEDY).status_code == 200, 60)
    assert eventually(service.nothing_held), service.node()


@pytest.mark.parametrize("who", ["master", "worker"])
def test_killed_gateway_comes_back(service: Service, who: str) -> None:
    """Whoever of the two is killed, the port is free for the next one."""
    master = service.pid_of("garnish.run_gateway")
    worker = next(pid for pid in descendants(master) if pid != master)
    os.kill({"master": master, "worker": worker}[who], signal.SIGKILL)
    assert eventually(lambda: worker not in service.processes())
    with service.client("acme") as http:
        assert eventually(lambda: _answers(http, "/invoke/dragon"), 60)


def _answers(http: httpx.Client, path: str) -> bool:
    try:
        return bool(http.post(path, json=GREEDY).status_code == 200)
    except httpx.HTTPError:
        return False


def test_whole_service_killed_mid_deploy(
    make_service: MakeService, stories_dir: Path, stories_adapters: dict[str, Path]
) -> None:
    """One deploy has sent half its body, and others follow each other, when everything is killed. Started again, it
    ends by TERM, and no process is left."""
    service = make_service(stories_dir).start()
    half_sent = _send_half_a_deploy(service, "unfinished", stories_adapters["ocean"])
    processes = service.processes()
    assert len(processes) >= 6  # up, gateway and its worker, node, API, engine
    assert service.process is not None
    acknowledged: list[str] = []
    some = threading.Event()
    deploying = threading.Thread(target=_deploy_on, args=(service, stories_adapters["ocean"], acknowledged, some))
    deploying.start()
    assert some.wait(30)
    service.process.kill()
    service.process.wait()
    half_sent.close()
    deploying.join(60)
    assert not deploying.is_alive()
    assert eventually(lambda: gone(processes)), processes
    assert eventually(lambda: can_listen(service.port))  # the last thread of a killed process may end a bit later

    service.start()
    with service.client("acme") as http:
        listed = [item["name"] for item in http.get("/functions").json()["functions"]]
        # The last one may have become visible just before its reply was lost.
        assert set(acknowledged) <= set(listed) <= {*acknowledged, f"f{len(acknowledged)}"}
        assert [http.post(f"/invoke/{name}", json=GREEDY).status_code for name in listed] == [200] * len(listed)
        assert http.post("/invoke/unfinished", json=GREEDY).status_code == 404
    assert deploy(service, "unfinished", stories_adapters["ocean"]) == 201
    assert list((service.state / "uploads").iterdir()) == []
    stop_amid_a_stream(service, "unfinished", signal.SIGTERM)


def _deploy_on(service: Service, directory: Path, acknowledged: list[str], some: threading.Event) -> None:
    """Deploys under new names until the service is gone; `some` is set after the third."""
    while True:
        name = f"f{len(acknowledged)}"
        try:
            if deploy(service, name, directory) != 201:
                return
        except httpx.HTTPError:
            return
        acknowledged.append(name)
        if len(acknowledged) == 3:
            some.set()


def _send_half_a_deploy(service: Service, name: str, directory: Path) -> socket.socket:
    """The open connection; its upload has begun when this returns."""
    weights = (directory / WEIGHTS_FILE).read_bytes()
    body = b"".join(
        b'--b\r\ncontent-disposition: form-data; name="%b"; filename="%b"\r\n\r\n%b\r\n'
        % (file.encode(), file.encode(), data)
        for file, data in ((CONFIG_FILE, (directory / CONFIG_FILE).read_bytes()), (WEIGHTS_FILE, weights))
    )
    raw = socket.create_connection(("127.0.0.1", service.port), timeout=30)
    head = f"POST /deploy/{name} HTTP/1.1\r\nhost: x\r\nauthorization: {service.headers('acme')['authorization']}\r\n"
    head += f"content-type: multipart/form-data; boundary=b\r\ncontent-length: {len(body) + 5}\r\n\r\n"
    raw.sendall(head.encode() + body[: len(body) - len(weights) // 2])
    assert eventually(lambda: any((service.state / "uploads").iterdir()))
    return raw


def test_stop_leaves_no_process(service: Service) -> None:
    """By Ctrl-C; the last test of the shared service, of which by now every part was killed and came back."""
    stop_amid_a_stream(service, "dragon", signal.SIGINT)
