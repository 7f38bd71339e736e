"""A new service forecasts nothing until its node has measured itself, which it does while nobody calls."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from whole_service import MakeService, Service, eventually

from cluster.performance_file import read_performance

CALL = {"prompt": "Once", "max_tokens": 2, "temperature": 0}
WAIT_S = 240


def candidate(service: Service) -> dict[str, Any]:
    """What GET /explain says of the node, about a call that is made now."""
    with service.client("acme") as http:
        made = http.post("/invoke/dragon", json=CALL).raise_for_status().json()["id"]
        (placement,) = http.get(f"/explain/{made}").raise_for_status().json()["placements"]
    shown = service.run("explain", made, "--state", "state")
    forecast = placement["decision"]["candidates"][0]
    assert ("no forecast" in shown.stdout) == (forecast["model"] == "assumed"), shown.stdout + shown.stderr
    return dict(forecast)


def test_forecasts_begin_when_the_node_has_measured_itself(
    make_service: MakeService, stories_dir: Path, stories_adapters: dict[str, Path]
) -> None:
    declared = {"dragon": {"tenant": "acme", "adapter": str(stories_adapters["dragon"])}}
    service = make_service(stories_dir, declared).start()
    before = candidate(service)
    assert (before["model"], before["ttft"], before["total"]) == ("assumed", None, None)

    def begun() -> bool:
        """Before that record is made anew, the engine may have ended: it is asked for a share that is far from it."""
        return 0.05 < service.node().get("measuring", 0.0) < 0.9

    assert eventually(begun, WAIT_S), service.logs()
    shown = service.run("nodes", "--state", "state").stdout
    os.kill(service.pid_of("node_agent.engine_process"), signal.SIGKILL)
    assert "measuring, " in shown or "no model" in shown
    assert not list((service.state / "profiles").glob("*performance*")), "no half a model is left"
    assert eventually(lambda: "performance" in service.node(), WAIT_S), service.logs()
    (file,) = (service.state / "profiles").glob("*performance*")
    assert not read_performance(file, None).thorough
    after = candidate(service)
    assert after["model"] == "measured"
    assert after["ttft"] > 0 and after["step"] > 0 and after["total"] > 0
    assert eventually(service.nothing_held), service.node()
