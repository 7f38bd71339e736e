"""A provisioned copy whose node is killed by SIGKILL comes back on another node, of real processes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import httpx
import pytest
from whole_service import FIRST_POLL_S, LONGEST_POLL_S, MakeService, Service, eventually

GREEDY = {"prompt": "Once upon a time", "max_tokens": 2, "temperature": 0}
PROMISED_SECONDS = 5.0
SLACK_SECONDS = 5.0
"""For a host that other tests share. `benchmarks/restored.py` has the figure of one at rest."""
LONGEST_LOOK = LONGEST_POLL_S
"""A look that took longer counts as this: the host stood still."""


@pytest.fixture(scope="module")
def three(make_service: MakeService, stories_dir: Path, stories_adapters: dict[str, Path]) -> Service:
    declared = {"dragon": {"tenant": "acme", "adapter": str(stories_adapters["dragon"]), "provisioned": {"device": 1}}}
    return make_service(stories_dir, declared).start("--nodes", "3")


def places(http: httpx.Client) -> dict[str, str]:
    """Tiers by node."""
    return {place["node"]: place["tier"] for place in http.get("/functions/dragon").json()["residency"]}


def supervisor_of(service: Service, node: str) -> int:
    """The process whose log is the node's."""
    found = [pid for pid, command in service.processes().items() if "garnish.run_node" in command]
    (pid,) = (pid for pid in found if os.readlink(f"/proc/{pid}/fd/2").endswith(f"/{node}.log"))
    return pid


def test_a_copy_is_back_within_five_seconds(three: Service) -> None:
    with three.client("acme") as http, three.client() as admin:
        assert eventually(lambda: "device" in places(http).values(), 60)
        (lost,) = (node for node, tier in places(http).items() if tier == "device")
        os.kill(supervisor_of(three, lost), signal.SIGKILL)
        spent, last = 0.0, time.monotonic()
        while "device" not in (there := {node: tier for node, tier in places(http).items() if node != lost}).values():
            time.sleep(FIRST_POLL_S)
            spent, last = spent + min(LONGEST_LOOK, time.monotonic() - last), time.monotonic()
            assert spent < PROMISED_SECONDS + SLACK_SECONDS
        (holder,) = (node for node, tier in there.items() if tier == "device")
        reply = http.post("/invoke/dragon", json=GREEDY)
        assert (reply.status_code, reply.headers["x-garnish-node"], reply.headers["x-garnish-cold-start"]) == (
            200, holder, "none",
        )  # fmt: skip

        def ready() -> set[str]:
            return {each["record"]["id"] for each in admin.get("/nodes").json()["nodes"]
                    if each["record"]["state"] == "ready"}  # fmt: skip

        assert eventually(lambda: ready() == {"node-1", "node-2", "node-3"}, 90)
        assert places(http)[holder] == "device", "it stays where it came to"
    assert three.stop() == 0
