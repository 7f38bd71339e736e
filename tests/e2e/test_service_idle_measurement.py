"""A new service forecasts nothing until its node has measured itself, which it does while nobody calls."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from whole_service import MakeService, Service, eventually

from cluster.performance_file import read_performance

CALL = {"prompt": "Once", "max_tokens": 2, "temperature": 0}
WAIT_S = 240


def call(service: Service) -> str:
    """Returns the id of a call that has ended."""
    with service.client("acme") as http:
        return str(http.post("/invoke/dragon", json=CALL).raise_for_status().json()["id"])


def candidate(service: Service, made: str) -> dict[str, Any]:
    """What GET /explain says of the node, about that call."""
    with service.client("acme") as http:
        (decision,) = http.get(f"/explain/{made}").raise_for_status().json()["decisions"]
    shown = service.run("explain", made, "--state", "state")
    forecast = decision["decision"]["candidates"][0]
    assert ("no forecast" in shown.stdout) == (forecast["model"] == "assumed"), shown.stdout + shown.stderr
    return dict(forecast)


@pytest.mark.alone  # a node goes on measuring only after a pause where others use its core
def test_forecasts_begin_when_the_node_has_measured_itself(
    make_service: MakeService, stories_dir: Path, stories_adapters: dict[str, Path]
) -> None:
    declared = {"dragon": {"tenant": "acme", "adapter": str(stories_adapters["dragon"])}}
    service = make_service(stories_dir, declared).start()
    made = call(service)
    # within the seconds that a node must be quiet for before it begins
    assert eventually(lambda: "measuring" in service.node(), WAIT_S), service.logs()
    os.kill(service.pid_of("node_agent.engine_process"), signal.SIGKILL)
    assert not list((service.state / "profiles").glob("*performance*")), "no half a model is left"
    before = candidate(service, made)
    assert (before["model"], before["ttft"], before["total"]) == ("assumed", None, None)
    assert eventually(lambda: "performance" in service.node(), WAIT_S), service.logs()
    (file,) = (service.state / "profiles").glob("*performance*")
    assert not read_performance(file, None).thorough
    after = candidate(service, call(service))
    assert after["model"] == "measured"
    assert after["ttft"] > 0 and after["step"] > 0 and after["total"] > 0
    assert eventually(service.nothing_held), service.node()
