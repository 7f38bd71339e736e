"""`garnish infra` by terraform itself over stand-ins of nodes: what it looks at, plans, refuses, and ends."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from typing import Any

import pytest

from garnish import node_pools
from garnish.errors import FrontDoorError
from garnish.provision import DEAD, _progress
from infra.processes import NodeKey, StillRunning
from infra.workspace import SavedPlan
from tests.garnish.local_pools import Pools
from tests.infra.stacks import needs_terraform

pytestmark = needs_terraform


def test_what_lives_is_left_alone_and_what_died_is_replaced(pools: Pools) -> None:
    pools.made()
    assert pools.plan() == []
    pools.kill("here-2")
    assert pools.plan() == [("replace", "here-2", DEAD)]
    (shown,) = pools.provision().show()
    assert (shown.nodes, shown.drift) == ({"here-1": "alive", "here-2": "dead"}, ["here-2 has died"])


def test_a_dead_node_that_is_no_longer_wanted_is_not_replaced(pools: Pools) -> None:
    pools.made()
    pools.kill("here-2")
    pools.declare({"here": 1})
    assert pools.plan() == [("destroy", "here-2", "fewer nodes are desired")]


def test_nodes_of_a_pool_that_is_no_longer_declared_end(pools: Pools) -> None:
    """Terraform runs no provisioner of a resource whose module is gone."""
    pools.made()
    pools.declare({"other": 0})
    (_, gone) = pools.provision().show()
    assert (gone.pool, gone.drift) == ("here", ["no longer declared"])
    assert [change[0] for change in pools.plan()] == ["destroy", "destroy"]
    pools.apply()
    assert [process.wait(30) for process in pools.running.values()] == [-signal.SIGTERM] * 2
    assert any("can't drain here-1, here-2 (unreachable)" in line for line in pools.told)


def test_a_process_that_no_state_holds_ends(pools: Pools) -> None:
    pools.made()
    pools.start("here-3")
    (shown,) = pools.provision().show()
    assert shown.nodes == {"here-1": "alive", "here-2": "alive", "here-3": "alive"}
    assert shown.drift == ["here-3 runs, and no state holds it"]
    assert pools.plan() == [("destroy", "here-3", "no state holds it")], "nothing ends that the plan does not tell"
    pools.apply()
    assert pools.running["here-3"].wait(30) == -signal.SIGTERM
    assert [pools.running[node].poll() for node in ("here-1", "here-2")] == [None, None]


def test_who_does_not_agree_changes_nothing(pools: Pools) -> None:
    pools.plan()

    def refuse(_note: SavedPlan) -> None:
        raise FrontDoorError("no")

    with pytest.raises(FrontDoorError, match="no"):
        pools.provision().apply(refuse, pools.told.append)
    assert [change[0] for change in pools.plan()] == ["create", "create"]


def test_another_file_needs_another_plan(pools: Pools) -> None:
    with pytest.raises(FrontDoorError, match="no saved plan"):
        pools.apply()
    pools.plan()
    pools.file.write_text(pools.file.read_text() + "\n# a comment\n")
    with pytest.raises(FrontDoorError, match=r"made for another serverless\.yml"):
        pools.apply()


def test_an_interpolated_value_belongs_to_the_plan(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    pools.declare({"here": 2}, registry="${env:REGISTRY}")
    monkeypatch.setenv("REGISTRY", "./one")
    pools.plan()
    monkeypatch.setenv("REGISTRY", "./two")
    with pytest.raises(FrontDoorError, match=r"made for another serverless\.yml"):
        pools.apply()


def test_a_creation_that_broke_off_is_drift(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = "import sys; sys.exit('create' in sys.argv and '\"here-2\"' in sys.argv[2])"
    monkeypatch.setattr(node_pools, "PROGRAM", (sys.executable, "-c", failing))
    pools.plan()
    with pytest.raises(FrontDoorError, match="terraform failed"):
        pools.apply()
    for node in ("here-1", "here-2"):
        pools.start(node)
    (shown,) = pools.provision().show()
    assert shown.drift == ["here-2: its creation did not end well"]


def test_a_state_in_another_directory_is_not_left_there(pools: Pools) -> None:
    """Else what it knows of would be made a second time, and never ended."""
    pools.made()
    here, elsewhere = dict[str, Any](), {"infra": {"state": "./else where"}}
    for other, before in ((elsewhere, here), (here, elsewhere)):
        pools.declare({"here": 2}, **other)
        for command in (pools.plan, pools.provision().show):
            with pytest.raises(FrontDoorError, match="Set it back, or move the state: ") as told:
                command()
        pools.declare({"here": 2}, **before)
        assert pools.plan() == [], "set back"
        pools.declare({"here": 2}, **other)
        (move,) = re.findall("`(.*)`", str(told.value))
        subprocess.run(move, shell=True, check=True, timeout=60)
        assert pools.plan() == [], "moved"
    assert [process.poll() for process in pools.running.values()] == [None, None]


def test_a_process_that_does_not_end_is_told(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one that hangs in the kernel does not, and that can't be made here."""
    pools.made()
    pools.start("here-3")

    def hang(key: NodeKey, _grace: float) -> None:
        raise StillRunning(f"{key.node}: the processes 1 don't end")

    monkeypatch.setattr("garnish.provision.stop", hang)
    pools.plan()
    with pytest.raises(FrontDoorError, match="here-3: the processes 1 don't end"):
        pools.apply()


def test_long_work_says_that_it_goes_on() -> None:
    told: list[str] = []
    hook = {"resource": {"resource_key": "here-1"}, "action": "delete", "elapsed_seconds": 20}
    for kind in ("apply_start", "apply_progress", "apply_errored", "refresh_start"):
        _progress({"type": kind, "hook": hook}, told.append)
    assert told == ["here-1: destroy", "here-1: destroy for 20 s", "here-1: destroy failed"]
