"""`garnish infra` by terraform itself over stand-ins of nodes: what drains before it goes, and what serves again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from garnish import node_pools
from garnish.errors import FrontDoorError
from infra.workspace import NOTE_FILE, PLAN_FILE, SavedPlan
from tests.garnish.draining_gateway import running_gateway
from tests.garnish.local_pools import Pools
from tests.infra.stacks import needs_terraform

pytestmark = needs_terraform


def test_what_goes_is_drained_before_it_is_destroyed(pools: Pools) -> None:
    with running_gateway(pools.port) as gateway:
        gateway.open = {"here-1": 3, "here-2": 2, "another": 1}
        pools.made()
        pools.declare({"here": 1})
        pools.plan()
        pools.apply()
        assert (gateway.drained, gateway.open["here-2"]) == (["here-2"], 0)
        assert pools.told.index("draining: requests are open on here-2") < pools.told.index("here-2: destroy")
        pools.provision().destroy(lambda note: None, pools.told.append, force=False)
        assert (gateway.drained, gateway.open["here-1"]) == (["here-2", "here-1"], 0)
        assert gateway.open["another"] > 0, "it is of no pool"


def test_destroy_needs_the_gateway_while_nodes_live(pools: Pools) -> None:
    pools.made()
    with pytest.raises(FrontDoorError, match=r"nothing was destroyed\. --force"):
        pools.provision().destroy(lambda note: None, pools.told.append, force=False)
    assert [process.poll() for process in pools.running.values()] == [None, None]
    note = pools.provision().destroy(lambda note: None, pools.told.append, force=True)
    assert len(note.changes) == 2
    assert [process.wait(30) for process in pools.running.values()] == [-signal.SIGTERM] * 2
    assert pools.provision().destroy(lambda note: None, pools.told.append, force=False).changes == ()


def test_destroying_dead_nodes_needs_no_gateway(pools: Pools) -> None:
    pools.plan()
    pools.apply()
    assert len(pools.provision().destroy(lambda note: None, pools.told.append, force=False).changes) == 2


def test_nodes_of_a_lost_state_are_destroyed_as_others_are(pools: Pools) -> None:
    """Shown first, drained, and not without the gateway."""
    pools.made()
    for file in (pools.state / "infra" / "demo").glob("terraform.tfstate*"):
        file.unlink()
    assert pools.plan() == [("replace", node, "no state holds it") for node in ("here-1", "here-2")]
    shown: list[tuple[str, str]] = []

    def confirm(note: SavedPlan) -> None:
        shown.extend((change.resource, change.reason) for change in note.changes)

    with pytest.raises(FrontDoorError, match=r"nothing was destroyed\. --force"):
        pools.provision().destroy(confirm, pools.told.append, force=False)
    assert shown == [("here-1", "no state holds it"), ("here-2", "no state holds it")]
    assert [process.poll() for process in pools.running.values()] == [None, None]
    with running_gateway(pools.port) as gateway:
        gateway.open = {"here-1": 1, "here-2": 0, "another": 1}
        pools.provision().destroy(confirm, pools.told.append, force=False)
        assert gateway.drained == ["here-1", "here-2"]
    assert [process.wait(30) for process in pools.running.values()] == [-signal.SIGTERM] * 2


def test_what_terraform_does_not_even_begin_leaves_nodes_as_they_are(pools: Pools) -> None:
    """They serve again, and what is being made by whoever has changed the state is not taken for a stray."""
    directory = pools.state / "infra" / "demo"
    with running_gateway(pools.port) as gateway:
        gateway.open = {"here-1": 0, "here-2": 0}
        pools.made()
        pools.declare({"here": 1})
        pools.plan()
        saved = {name: (directory / name).read_bytes() for name in (PLAN_FILE, NOTE_FILE)}
        pools.apply()
        assert pools.running["here-2"].wait(30) == -signal.SIGTERM
        gateway.drained.clear()
        gateway.orders.clear()

        for name, content in saved.items():
            (directory / name).write_bytes(content)
        pools.start("here-3")
        with pytest.raises(FrontDoorError, match="state has changed since"):
            pools.apply()
        assert gateway.orders == ["drain here-2", "undrain here-2"]
        assert pools.running["here-3"].poll() is None


APPLYING = """
import sys
from pathlib import Path
from garnish import node_pools
from garnish.provision import Provision
node_pools.PROGRAM = ("true",)
Provision(Path(sys.argv[1]), Path(sys.argv[2])).apply(lambda note: None, lambda line: print(line, flush=True))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_nodes_serve_again_when_a_signal_ends_their_drain(pools: Pools, number: signal.Signals) -> None:
    with running_gateway(pools.port) as gateway:
        gateway.open, gateway.stuck = {"here-1": 0, "here-2": 1}, {"here-2"}
        pools.made()
        pools.declare({"here": 1})
        pools.plan()
        command = [sys.executable, "-c", APPLYING, str(pools.file), str(pools.state)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "draining: requests are open on here-2\n"
            process.send_signal(number)
            process.stdout.read()
            assert process.wait(30) != 0
        assert gateway.orders == ["drain here-2", "undrain here-2"]
        assert pools.running["here-2"].poll() is None


NOTING_STOP = """
import json, sys, time
from pathlib import Path
if sys.argv[1] == "stop":
    spec = json.loads(sys.argv[2])
    (Path(spec["state"]) / f"stop.{spec['node']}").touch()
    time.sleep(60)
"""


def test_nodes_that_terraform_did_not_come_to_serve_again(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends ten at a time; Ctrl-C comes while it does."""
    monkeypatch.setattr(node_pools, "PROGRAM", (sys.executable, "-c", NOTING_STOP))
    nodes = [f"here-{number + 1}" for number in range(12)]
    pools.declare({"here": 12})
    pools.plan()
    pools.apply()

    def ending() -> set[str]:
        return {file.suffix[1:] for file in pools.state.glob("stop.*")}

    def tell(_line: str) -> None:
        deadline = time.monotonic() + 60
        while len(ending()) < 10 and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    with running_gateway(pools.port) as gateway:
        gateway.open = dict.fromkeys(nodes, 0)
        pools.declare({"here": 0})
        pools.plan()
        with pytest.raises(FrontDoorError, match="interrupted"):
            pools.provision().apply(lambda note: None, tell)
        assert len(ending()) == 10
        (shown,) = pools.provision().show()
        assert (list(shown.nodes), shown.desired, shown.applied) == (nodes, 0, 0), "what the state still holds"
        assert "here-12 was to go, and its end broke off" in shown.drift
        assert set(gateway.drained) == ending(), "the others serve again"
