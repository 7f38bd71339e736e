"""`garnish infra` by terraform itself over stand-ins of nodes: what it looks at, refuses, and ends."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from garnish import node_pools
from garnish.errors import FrontDoorError
from garnish.provision import DEAD, Provision, _progress
from infra.autoscale.sizes import SetSize, set_size
from infra.errors import InfraError
from infra.local.processes import NodeKey, StillRunning, remember
from infra.terraform import PROGRAMS
from infra.workspace import NOTE_FILE, PLAN_FILE, PlanNote
from tests.garnish.draining_gateway import running_gateway

SLEEP = "import time; print('up', flush=True); time.sleep(600)"


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting and ending a node does nothing here; the tests start what looks like one."""
    if not any(os.access(Path(folder) / name, os.X_OK) for folder in os.get_exec_path() for name in PROGRAMS):
        pytest.skip("neither terraform nor tofu is on PATH: `garnish infra` is NOT tested")
    monkeypatch.setattr(node_pools, "PROGRAM", (sys.executable, "-c", "pass"))
    for name in ("GARNISH_URL", "GARNISH_API_KEY"):
        monkeypatch.delenv(name, raising=False)


class Pools:
    def __init__(self, folder: Path) -> None:
        self.folder, self.state, self.told = folder, folder / "state", list[str]()
        self.state.mkdir()
        (self.state / "credentials.toml").write_text('url = "http://127.0.0.1:9"\ntenant = "default"\n')
        self.declare({"here": 2})
        self.running: dict[str, subprocess.Popen[str]] = {}

    def declare(self, pools: dict[str, int]) -> None:
        declared = {name: {"backend": "local", "desired": count, "max": max(3, count)} for name, count in pools.items()}
        text = json.dumps({"service": "demo", "base_model": "./model", "node_pools": declared})
        (self.folder / "serverless.yml").write_text(text)

    def provision(self) -> Provision:
        return Provision(self.folder / "serverless.yml", self.state)

    def plan(self) -> list[tuple[str, str, str]]:
        note = self.provision().plan(self.told.append)
        return [(change.action, change.resource, change.reason) for change in note.changes]

    def apply(self) -> PlanNote:
        return self.provision().apply(lambda note: None, self.told.append)

    def start(self, node: str) -> None:
        key = NodeKey(state=str(self.state), service="demo", pool=node.rpartition("-")[0], node=node)
        self.running[node] = process = subprocess.Popen(
            [sys.executable, "-c", SLEEP],
            env={**os.environ, **key.environment()},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        remember(key, process.pid)

    def made(self) -> Pools:
        """Applied, with a process for each node."""
        self.plan()
        self.apply()
        for node in ("here-1", "here-2"):
            self.start(node)
        return self


@pytest.fixture
def pools(tmp_path: Path) -> Iterator[Pools]:
    made = Pools(tmp_path)
    yield made
    for process in made.running.values():
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_what_lives_is_left_alone_and_what_died_is_replaced(pools: Pools) -> None:
    pools.made()
    assert pools.plan() == []
    os.kill(pools.running["here-2"].pid, signal.SIGKILL)
    pools.running["here-2"].wait()
    assert pools.plan() == [("replace", "here-2", DEAD)]
    (shown,) = pools.provision().show()
    assert (shown.nodes, shown.drift) == ({"here-1": "alive", "here-2": "dead"}, ["here-2 has died"])


def test_a_dead_node_that_is_no_longer_wanted_is_not_replaced(pools: Pools) -> None:
    pools.made()
    os.kill(pools.running["here-2"].pid, signal.SIGKILL)
    pools.running["here-2"].wait()
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


def test_destroy_needs_the_gateway_while_nodes_live(pools: Pools) -> None:
    pools.made()
    with pytest.raises(FrontDoorError, match=r"nothing was destroyed\. --force"):
        pools.provision().destroy(lambda note: None, pools.told.append, force=False)
    assert [process.poll() for process in pools.running.values()] == [None, None]
    note = pools.provision().destroy(lambda note: None, pools.told.append, force=True)
    assert len(note.changes) == 2
    assert [process.wait(30) for process in pools.running.values()] == [-signal.SIGTERM] * 2
    assert pools.provision().destroy(lambda note: None, pools.told.append, force=False).changes == ()


def test_what_goes_is_drained_before_it_is_destroyed(pools: Pools) -> None:
    with running_gateway() as gateway:
        gateway.open = {"here-1": 3, "here-2": 2, "another": 1}
        (pools.state / "credentials.toml").write_text(f'url = "{gateway.url}"\ntenant = "default"\n')
        pools.made()
        pools.declare({"here": 1})
        pools.plan()
        pools.apply()
        assert (gateway.drained, gateway.open["here-2"]) == (["here-2"], 0)
        assert pools.told.index("draining: requests are open on here-2") < pools.told.index("here-2: destroy")
        pools.provision().destroy(lambda note: None, pools.told.append, force=False)
        assert (gateway.drained, gateway.open["here-1"]) == (["here-2", "here-1"], 0)
        assert gateway.open["another"] > 0, "it is of no pool"


def test_long_work_says_that_it_goes_on() -> None:
    told: list[str] = []
    hook = {"resource": {"resource_key": "here-1"}, "action": "delete", "elapsed_seconds": 20}
    for kind in ("apply_start", "apply_progress", "apply_errored", "refresh_start"):
        _progress({"type": kind, "hook": hook}, told.append)
    assert told == ["here-1: destroy", "here-1: destroy for 20 s", "here-1: destroy failed"]


def test_destroying_dead_nodes_needs_no_gateway(pools: Pools) -> None:
    pools.plan()
    pools.apply()
    assert len(pools.provision().destroy(lambda note: None, pools.told.append, force=False).changes) == 2


def test_who_does_not_agree_changes_nothing(pools: Pools) -> None:
    pools.plan()

    def refuse(_note: PlanNote) -> None:
        raise FrontDoorError("no")

    with pytest.raises(FrontDoorError, match="no"):
        pools.provision().apply(refuse, pools.told.append)
    assert [change[0] for change in pools.plan()] == ["create", "create"]


def test_another_file_needs_another_plan(pools: Pools) -> None:
    with pytest.raises(FrontDoorError, match="no saved plan"):
        pools.apply()
    pools.plan()
    file = pools.folder / "serverless.yml"
    file.write_text(file.read_text() + "\n# a comment\n")
    with pytest.raises(FrontDoorError, match=r"made for another serverless\.yml"):
        pools.apply()


def test_an_interpolated_value_belongs_to_the_plan(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (pools.folder / "serverless.yml").read_text()
    written: dict[str, Any] = {**json.loads(text), "registry": "${env:REGISTRY}"}
    (pools.folder / "serverless.yml").write_text(json.dumps(written))
    monkeypatch.setenv("REGISTRY", "./one")
    pools.plan()
    monkeypatch.setenv("REGISTRY", "./two")
    with pytest.raises(FrontDoorError, match=r"made for another serverless\.yml"):
        pools.apply()


def sized(pools: Pools, size: int, stated: int = 2) -> None:
    """As the autoscaler notes it."""
    set_size(pools.state / "infra" / "demo", "here", SetSize(size, stated))


def test_the_autoscaler_s_size_is_made_so_and_kept(pools: Pools) -> None:
    pools.made()
    sized(pools, 3)
    assert pools.plan() == [("create", "here-3", "not there yet")]
    pools.provision().resize(pools.told.append)
    pools.start("here-3")
    assert pools.plan() == []
    provision = pools.provision()
    told = "the autoscaler has set 3, serverless.yml says 2"
    assert provision.sizes_told() == [f"node_pools.here: {told}; the plan keeps that, until `desired` is edited"]
    (shown,) = provision.show()
    assert (shown.desired, shown.applied, shown.drift) == (3, 3, [told])

    sized(pools, 1)
    pools.provision().resize(pools.told.append)
    assert [pools.running[node].wait(30) for node in ("here-2", "here-3")] == [-signal.SIGTERM] * 2
    assert pools.plan() == []
    pools.declare({"here": 3})
    assert [change[:2] for change in pools.plan()] == [("create", "here-2"), ("create", "here-3")]
    assert pools.provision().sizes_told() == []


def test_a_size_also_replaces_what_died(pools: Pools) -> None:
    pools.made()
    os.kill(pools.running["here-2"].pid, signal.SIGKILL)
    pools.running["here-2"].wait()
    assert pools.plan() == [("replace", "here-2", DEAD)]
    pools.provision().resize(pools.told.append)
    (shown,) = pools.provision().show()
    assert shown.applied == 2


def test_a_size_carries_out_nothing_that_nobody_looked_at(pools: Pools) -> None:
    with pytest.raises(InfraError, match=r"node_pools\.here was not made yet: run `garnish infra plan`"):
        pools.provision().resize(pools.told.append)
    pools.made()
    file = pools.folder / "serverless.yml"
    file.write_text(json.dumps({**json.loads(file.read_text()), "node": {"dtype": "float32"}}))
    sized(pools, 3)
    with pytest.raises(InfraError, match=r"replace of here-1 \(the nodes' settings have changed\) was not applied yet"):
        pools.provision().resize(pools.told.append)
    (shown,) = pools.provision().show()
    assert shown.applied == 2
    with pytest.raises(FrontDoorError, match="no saved plan"):
        pools.apply()


def test_destroy_forgets_the_sizes(pools: Pools) -> None:
    pools.plan()
    pools.apply()
    sized(pools, 1)
    pools.provision().destroy(lambda note: None, pools.told.append, force=True)
    assert [change[1] for change in pools.plan()] == ["here-1", "here-2"]


def test_a_plan_from_before_a_size_was_set_is_refused(pools: Pools) -> None:
    pools.plan()
    sized(pools, 3)
    with pytest.raises(FrontDoorError, match="before the autoscaler changed a size"):
        pools.apply()


def test_the_autoscaler_leaves_a_saved_plan_alone(pools: Pools) -> None:
    """What it could not do has changed nothing; what it did makes the plan stale, as Terraform says."""
    pools.made()
    file = pools.folder / "serverless.yml"
    before = file.read_text()
    file.write_text(json.dumps({**json.loads(before), "node": {"dtype": "float32"}}))
    assert [change[0] for change in pools.plan()] == ["replace", "replace"]
    sized(pools, 3)
    with pytest.raises(InfraError, match="was not applied yet"):
        pools.provision().resize(pools.told.append)
    sized(pools, 2)
    assert len(pools.apply().changes) == 2

    file.write_text(before)
    pools.plan()
    pools.apply()
    os.kill(pools.running["here-2"].pid, signal.SIGKILL)
    pools.running["here-2"].wait()
    assert pools.plan() == [("replace", "here-2", DEAD)]
    pools.provision().resize(pools.told.append)
    with pytest.raises(FrontDoorError, match="state has changed since"):
        pools.apply()


def test_nodes_of_a_lost_state_are_destroyed_as_others_are(pools: Pools) -> None:
    """Shown first, drained, and not without the gateway."""
    pools.made()
    for file in (pools.state / "infra" / "demo").glob("terraform.tfstate*"):
        file.unlink()
    assert pools.plan() == [("replace", node, "no state holds it") for node in ("here-1", "here-2")]
    shown: list[tuple[str, str]] = []

    def confirm(note: PlanNote) -> None:
        shown.extend((change.resource, change.reason) for change in note.changes)

    with pytest.raises(FrontDoorError, match=r"nothing was destroyed\. --force"):
        pools.provision().destroy(confirm, pools.told.append, force=False)
    assert shown == [("here-1", "no state holds it"), ("here-2", "no state holds it")]
    assert [process.poll() for process in pools.running.values()] == [None, None]
    with running_gateway() as gateway:
        gateway.open = {"here-1": 1, "here-2": 0, "another": 1}
        (pools.state / "credentials.toml").write_text(f'url = "{gateway.url}"\ntenant = "default"\n')
        pools.provision().destroy(confirm, pools.told.append, force=False)
        assert gateway.drained == ["here-1", "here-2"]
    assert [process.wait(30) for process in pools.running.values()] == [-signal.SIGTERM] * 2


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
    file = pools.folder / "serverless.yml"
    text = file.read_text()
    elsewhere = json.dumps({**json.loads(text), "infra": {"state": "./else where"}})
    for other, before in ((elsewhere, text), (text, elsewhere)):
        file.write_text(other)
        for command in (pools.plan, pools.provision().show):
            with pytest.raises(FrontDoorError, match="Set it back, or move the state: ") as told:
                command()
        file.write_text(before)
        assert pools.plan() == [], "set back"
        file.write_text(other)
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


def test_what_terraform_does_not_even_begin_leaves_nodes_as_they_are(pools: Pools) -> None:
    """They serve again, and what is being made by whoever has changed the state is not taken for a stray."""
    directory = pools.state / "infra" / "demo"
    with running_gateway() as gateway:
        gateway.open = {"here-1": 0, "here-2": 0}
        (pools.state / "credentials.toml").write_text(f'url = "{gateway.url}"\ntenant = "default"\n')
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
node_pools.PROGRAM = (sys.executable, "-c", "pass")
Provision(Path(sys.argv[1]), Path(sys.argv[2])).apply(lambda note: None, lambda line: print(line, flush=True))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_nodes_serve_again_when_a_signal_ends_their_drain(pools: Pools, number: signal.Signals) -> None:
    with running_gateway() as gateway:
        gateway.open, gateway.stuck = {"here-1": 0, "here-2": 1}, {"here-2"}
        (pools.state / "credentials.toml").write_text(f'url = "{gateway.url}"\ntenant = "default"\n')
        pools.made()
        pools.declare({"here": 1})
        pools.plan()
        command = [sys.executable, "-c", APPLYING, str(pools.folder / "serverless.yml"), str(pools.state)]
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

    with running_gateway() as gateway:
        gateway.open = dict.fromkeys(nodes, 0)
        (pools.state / "credentials.toml").write_text(f'url = "{gateway.url}"\ntenant = "default"\n')
        pools.declare({"here": 0})
        pools.plan()
        with pytest.raises(FrontDoorError, match="interrupted"):
            pools.provision().apply(lambda note: None, tell)
        assert len(ending()) == 10
        (shown,) = pools.provision().show()
        assert (list(shown.nodes), shown.desired, shown.applied) == (nodes, 0, 0), "what the state still holds"
        assert "here-12 was to go, and its end broke off" in shown.drift
        assert set(gateway.drained) == ending(), "the others serve again"
