"""The whole process under gunicorn: serves, survives its worker, stops within a bound, refuses to start in vain."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import httpx_sse
import msgspec
import pytest
from running_gateway import until
from stub_node import StubNode, echo, hang_after_first, stub_node

from adapters.base_model import load_base_model
from adapters.local_store import LocalStore
from adapters.tenants import Tenants
from cluster.secret import create_secret
from gateway.config import GatewayConfig
from tests.support.ports import free_port

PROGRAM = """
import sys, msgspec
from gateway.config import GatewayConfig
from gateway.server import run
run(msgspec.json.decode(sys.stdin.buffer.read(), type=GatewayConfig))
"""


@pytest.fixture
def config(stories_dir: Path, tmp_path: Path) -> GatewayConfig:
    port = free_port()
    create_secret(tmp_path / "secret")
    return GatewayConfig(
        model_dir=str(stories_dir),
        base_id="stories260K",
        registry=str(tmp_path / "registry"),
        secret_file=str(tmp_path / "secret"),
        tmp_dir=str(tmp_path / "uploads"),
        port=port,
        auth="none",
        record_expiry=600.0,
        node_silence=600.0,
        shutdown_seconds=1.0,
    )


@contextmanager
def process(config: GatewayConfig, log: Path, program: str = PROGRAM) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stderr=out, stdout=out)
    try:
        assert child.stdin is not None
        child.stdin.write(msgspec.json.encode(config))
        child.stdin.close()
        yield child
    finally:
        child.kill()
        child.wait(30)


def wait_for(url: str, path: str, child: subprocess.Popen[bytes]) -> httpx.Response:
    """The answer, asked for again while nobody listens."""
    with httpx.Client(timeout=30, verify=False) as client:
        while child.poll() is None:
            try:
                return client.get(url + path)
            except httpx.TransportError:
                time.sleep(0.01)
    raise AssertionError(f"the gateway ended with {child.returncode}")


def node_of(config: GatewayConfig, script: Any) -> StubNode:
    base = load_base_model(Path(config.model_dir), config.base_id)
    secret = Path(config.secret_file).read_text().strip()
    return StubNode("n", base.fingerprint, secret, base.max_context, script)


def worker_of(pid: int) -> int:
    """Waits for it, as long as a test may take: one that has just ended is replaced."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    while not (pids := children.read_text().split()):
        time.sleep(0.01)
    return int(pids[0])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT])
def test_serves_and_ends_open_streams_when_told_to(
    config: GatewayConfig, tmp_path: Path, number: signal.Signals
) -> None:
    """The signal comes to the first process alone, as from a supervisor: a terminal sends INT to the workers, too."""
    url = f"http://127.0.0.1:{config.port}"
    with process(config, tmp_path / "log") as child, stub_node(node_of(config, hang_after_first)) as node:
        assert wait_for(url, "/healthz", child).status_code == 200
        assert node.publish(url).status_code == 204
        with (
            httpx.Client(base_url=url, timeout=60, verify=False) as client,
            httpx_sse.connect_sse(
                client, "POST", "/invoke/stories260K", json={"prompt": "x", "stream": True}
            ) as source,
        ):
            events = source.iter_sse()
            assert next(events).event == "token"
            child.send_signal(number)
            last = next(events)
            assert last.event == "error"
            assert last.json()["error"]["type"] == "unavailable"
        assert child.wait(30) == 0
        assert node.disconnected.wait(30)
        with socket.create_server(("127.0.0.1", config.port)):
            pass  # the port is free again
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert all({"time", "level", "logger", "message"} <= set(line) for line in lines)


def test_whole_replies_are_told_on_term(config: GatewayConfig, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{config.port}"
    with process(config, tmp_path / "log") as child, stub_node(node_of(config, hang_after_first)) as node:
        wait_for(url, "/healthz", child)
        assert node.publish(url).status_code == 204
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(httpx.post, f"{url}/invoke/stories260K", json={"prompt": "x"}, timeout=60, verify=False)
            assert node.began.wait(30)
            child.send_signal(signal.SIGTERM)
            reply = call.result(60)
        assert (reply.status_code, reply.json()["error"]["type"]) == (503, "unavailable")
        assert child.wait(30) == 0


def test_a_killed_worker_is_replaced(config: GatewayConfig, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{config.port}"
    with process(config, tmp_path / "log") as child, stub_node(node_of(config, echo)) as node:
        wait_for(url, "/healthz", child)
        os.kill(worker_of(child.pid), signal.SIGKILL)
        assert wait_for(url, "/healthz", child).status_code == 200
        assert node.publish(url).status_code == 204
        assert (
            httpx.post(f"{url}/invoke/stories260K", json={"prompt": "x"}, timeout=30, verify=False).status_code == 200
        )
        child.send_signal(signal.SIGTERM)
        assert child.wait(30) == 0


def test_usage_survives_a_kill(config: GatewayConfig, tmp_path: Path) -> None:
    """Everything that was acknowledged is counted, once, though the registry had not been told."""
    url = f"http://127.0.0.1:{config.port}"
    base, seen = config.base_id, []
    with stub_node(node_of(config, echo)) as node:
        for life in range(2):
            with process(config, tmp_path / "log") as child:
                wait_for(url, "/healthz", child)
                assert node.publish(url).status_code == 204
                with httpx.Client(base_url=url, timeout=60, verify=False) as client:
                    for number in range(5 + life):
                        call = {"prompt": "x" * number, "max_tokens": 1 + number}
                        seen.append(client.post(f"/invoke/{base}", json=call).json()["usage"])
                worker = worker_of(child.pid)
                os.kill(child.pid, signal.SIGKILL)
                os.kill(worker, signal.SIGKILL)
        with process(config, tmp_path / "log") as child:
            wait_for(url, "/healthz", child)
            total = httpx.get(f"{url}/usage", timeout=30, verify=False).json()["total"]
            child.send_signal(signal.SIGTERM)
            assert child.wait(30) == 0
    assert total["device_seconds"] > 0
    assert {name: total[name] for name in ("requests", "prompt_tokens", "completion_tokens", "cold_starts")} == {
        "requests": 11,
        "prompt_tokens": sum(usage["prompt_tokens"] for usage in seen),
        "completion_tokens": sum(usage["completion_tokens"] for usage in seen),
        "cold_starts": 11,  # the stub says of every call that it was one
    }


def test_a_clock_that_is_hours_ahead(config: GatewayConfig, tmp_path: Path) -> None:
    """It is told; keys end and usage counts all the same."""
    url, store = f"http://127.0.0.1:{config.port}", LocalStore(Path(config.registry))
    tenants = Tenants(store)
    tenants.put("acme")
    text, record = tenants.add_key("acme")
    program = "import time\nreal = time.time\ntime.time = lambda: real() + 6 * 3600\n" + PROGRAM
    with (
        process(msgspec.structs.replace(config, auth="keys"), tmp_path / "log", program) as child,
        stub_node(node_of(config, echo)) as node,
        httpx.Client(base_url=url, headers={"authorization": f"Bearer {text}"}, timeout=30, verify=False) as client,
    ):
        wait_for(url, "/healthz", child)
        assert node.publish(url).status_code == 204
        assert client.post("/invoke/stories260K", json={"prompt": "x", "max_tokens": 1}).status_code == 200
        assert client.get("/usage").json()["total"]["requests"] == 1
        tenants.revoke_key("acme", record.key_id)
        until(lambda: client.get("/functions").status_code != 200)
        child.send_signal(signal.SIGTERM)
        assert child.wait(30) == 0
    assert "clock differs by +21600 s from the registry" in (tmp_path / "log").read_text()


def test_a_clock_that_is_set_while_it_runs(config: GatewayConfig, tmp_path: Path) -> None:
    """Each change is logged once, whatever is compared in between."""
    url, log, forward = f"http://127.0.0.1:{config.port}", tmp_path / "log", tmp_path / "forward"
    setting = (
        "import pathlib, time\nreal = time.time\n"
        f"time.time = lambda: real() + 6 * 3600 * pathlib.Path({str(forward)!r}).exists()\n"
        "import gateway.jobs.host_clock\ngateway.jobs.host_clock.CHECK_S = 0.01\n"
    )
    with process(config, log, setting + PROGRAM) as child:
        wait_for(url, "/healthz", child)
        assert "from the registry" not in log.read_text()
        forward.touch()
        until(lambda: "clock differs by +21600 s from the registry" in log.read_text())
        forward.unlink()
        until(lambda: "clock is right again" in log.read_text())
        child.send_signal(signal.SIGTERM)
        assert child.wait(30) == 0
    assert log.read_text().count("from the registry") == 2


def test_does_not_start_without_its_model(config: GatewayConfig, tmp_path: Path) -> None:
    broken = msgspec.structs.replace(config, model_dir=str(tmp_path / "nowhere"))
    with process(broken, tmp_path / "log") as child:
        assert child.wait(60) not in (0, None)
    assert "nowhere" in (tmp_path / "log").read_text()


def test_a_gateway_imports_no_torch() -> None:
    code = "import sys, gateway.server, gateway.app; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"


def test_a_silent_stream_is_finished_while_the_gateway_stops(config: GatewayConfig, tmp_path: Path) -> None:
    """No record reaches a gateway that stops: it asks the node instead, before it takes it for dead."""
    url, expiry, silence = f"http://127.0.0.1:{config.port}", 1.0, 6.0
    changed = msgspec.structs.replace(config, record_expiry=expiry, node_silence=silence, shutdown_seconds=600.0)
    with process(changed, tmp_path / "log") as child, stub_node(node_of(config, hang_after_first)) as node:
        wait_for(url, "/healthz", child)
        assert node.publish(url).status_code == 204
        with (
            httpx.Client(base_url=url, timeout=60, verify=False) as client,
            httpx_sse.connect_sse(
                client, "POST", "/invoke/stories260K", json={"prompt": "x", "stream": True}
            ) as source,
        ):
            events = source.iter_sse()
            assert next(events).event == "token"
            child.send_signal(signal.SIGTERM)
            began = time.monotonic()
            until(lambda: time.monotonic() - began > 1.5 * silence)
            node.go_on.set()
            assert [event.event for event in events][-1] == "done"
        assert child.wait(60) == 0
    assert node.asked > 1
