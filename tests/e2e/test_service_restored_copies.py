"""A provisioned copy whose node is killed by SIGKILL comes back on another node, of real processes."""

from __future__ import annotations

import os
import signal
import time

import httpx
from whole_service import FIRST_POLL_S, MAX_POLL_S, Service, eventually

FUNCTION = "copied"
GREEDY = {"prompt": "Once upon a time", "max_tokens": 2, "temperature": 0}
PROMISED_SECONDS = 5.0
SLACK_SECONDS = 5.0
"""For a host that other tests share. `benchmarks/faults/restored.py` has the figure of one at rest."""
LONGEST_LOOK = MAX_POLL_S
"""A look that took longer counts as this: the host stood still."""


def holders(http: httpx.Client, function: str) -> set[str]:
    """The nodes that have the function's adapter on their device."""
    residency = http.get(f"/functions/{function}").json()["residency"]
    return {place["node"] for place in residency if place["tier"] == "device"}


def supervisor_of(service: Service, node: str) -> int:
    """The process whose log is the node's."""
    found = [pid for pid, command in service.processes().items() if "garnish.run_node" in command]
    (pid,) = (pid for pid in found if os.readlink(f"/proc/{pid}/fd/2").endswith(f"/{node}.log"))
    return pid


def test_a_copy_is_back_within_five_seconds(trio: Service) -> None:
    with trio.client("acme") as http, trio.client() as admin:
        assert eventually(lambda: bool(holders(http, FUNCTION)), 60)
        (lost,) = holders(http, FUNCTION)
        os.kill(supervisor_of(trio, lost), signal.SIGKILL)
        spent, last = 0.0, time.monotonic()
        while not (back := holders(http, FUNCTION) - {lost}):
            time.sleep(FIRST_POLL_S)
            spent, last = spent + min(LONGEST_LOOK, time.monotonic() - last), time.monotonic()
            assert spent < PROMISED_SECONDS + SLACK_SECONDS
        (holder,) = back
        reply = http.post(f"/invoke/{FUNCTION}", json=GREEDY)
        assert (reply.status_code, reply.headers["x-garnish-node"], reply.headers["x-garnish-cold-start"]) == (
            200, holder, "none",
        )  # fmt: skip

        def ready() -> set[str]:
            return {each["record"]["id"] for each in admin.get("/nodes").json()["nodes"]
                    if each["record"]["state"] == "ready"}  # fmt: skip

        assert eventually(lambda: ready() == {"node-1", "node-2", "node-3"}, 90)
        assert holders(http, FUNCTION) == {holder}, "it stays where it came to"
