"""A node's API process that has few file descriptors serves its gateway, whatever others hold open."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import msgspec

from cluster.secret import authorization, create_secret
from node_agent.config import ApiProcessConfig
from tests.node_agent.served_node import node_config
from tests.support.idle_connections import LIMITED, closed, idle_connections, until
from tests.support.ports import free_port

LIMIT = 400
PROGRAM = LIMITED.format(soft=LIMIT, hard=LIMIT) + "from node_agent.api.app import main\nmain()\n"


def test_connections_without_the_secret_do_not_keep_the_gateway_out(tmp_path: Path, stories_dir: Path) -> None:
    secret = create_secret(tmp_path / "cluster.secret")
    node = msgspec.structs.replace(node_config(tmp_path, stories_dir, "http://127.0.0.1:1"), port=free_port())
    (tmp_path / "run").mkdir()
    config = ApiProcessConfig(socket=str(tmp_path / "run" / "engine.sock"), parent=os.getpid(), node=node)
    url = f"http://127.0.0.1:{node.port}"
    with (tmp_path / "log").open("wb") as log:
        child = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stderr=log)
    try:
        assert child.stdin is not None
        with child.stdin as stdin:
            stdin.write(msgspec.json.encode(config))
        until(lambda: child.poll() is not None or answers(url))
        with httpx.Client(base_url=url, headers=authorization(secret), timeout=60, verify=False) as gateway:
            assert gateway.get("/record").status_code == 200
            with idle_connections(node.port, 1500) as idle:
                for _ in range(50):
                    with httpx.Client(base_url=url, headers=gateway.headers, timeout=60, verify=False) as other:
                        assert other.get("/record").status_code == 200
                until(lambda: closed(idle) > 1500 - LIMIT)
            assert gateway.get("/record").status_code == 200
    finally:
        child.kill()
        child.wait(30)
    assert "file descriptors run short" in (tmp_path / "log").read_text()


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/healthz", timeout=60, verify=False).status_code == 200
    except httpx.TransportError:
        return False
