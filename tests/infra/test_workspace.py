"""Plan, apply and destroy by terraform itself; only the program that would start nodes is a stand-in."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import boto3
import msgspec
import pytest
from stacks import needs_terraform, pool, stack

from adapters.s3_url import S3Place
from infra.errors import StalePlan, StateElsewhere, StateLocked, TerraformFailed
from infra.render import render
from infra.stack import Pool, Stack
from infra.terraform import Event, Program, environment, find_program
from infra.workspace import PLAN_FILE, Workspace, digest_of, local_nodes, outputs

pytestmark = needs_terraform


class Place:
    """A workspace and the state directory where the stand-in notes its calls."""

    def __init__(self, folder: Path, program: Program) -> None:
        self.state = folder / "state"
        self.state.mkdir()
        self.workspace = Workspace(folder / "infra" / "demo", program)
        self.events: list[Event] = []

    def stack(self, *pools: Pool, revision: str = "1") -> Stack:
        return stack(*pools, state=str(self.state), revision=revision)

    def plan(self, wanted: Stack, dead: dict[str, str] | None = None) -> list[tuple[str, str, str]]:
        with self.workspace.locked():
            self.workspace.open(wanted)
            note = self.workspace.plan(wanted, digest_of(wanted, b"file"), dead)
        return [(change.action, change.resource, change.reason) for change in note.changes]

    def apply(self) -> None:
        with self.workspace.locked():
            self.workspace.apply(self.events.append)

    def destroy(self, wanted: Stack) -> None:
        with self.workspace.locked():
            self.workspace.open(wanted)
            self.workspace.plan(wanted, "", destroy=True)
            self.workspace.apply(self.events.append)

    def calls(self) -> list[str]:
        """Since the last look; those of one apply have no order."""
        file = self.state / "calls"
        lines = sorted(file.read_text().splitlines()) if file.exists() else []
        file.unlink(missing_ok=True)
        return lines

    def nodes(self) -> list[str]:
        return sorted(local_nodes(self.workspace.state()))


@pytest.fixture(scope="module")
def program() -> Program:
    return find_program()


@pytest.fixture
def place(tmp_path: Path, program: Program) -> Place:
    return Place(tmp_path, program)


def test_a_pool_grows_shrinks_and_goes(place: Place) -> None:
    assert place.plan(place.stack()) == [("create", "here-1", "not there yet")]
    assert place.calls() == [], "a plan does nothing"
    place.apply()
    assert (place.calls(), place.nodes()) == (["create here-1"], ["here-1"])
    assert place.plan(place.stack()) == []

    assert [change[:2] for change in place.plan(place.stack(pool(desired=3)))] == [
        ("create", "here-2"), ("create", "here-3")
    ]  # fmt: skip
    place.apply()
    assert (place.calls(), place.nodes()) == (["create here-2", "create here-3"], ["here-1", "here-2", "here-3"])
    assert outputs(place.workspace.state(), "pools")["here"]["nodes"] == ["here-1", "here-2", "here-3"]

    less = "fewer nodes are desired"
    assert place.plan(place.stack()) == [("destroy", "here-2", less), ("destroy", "here-3", less)]
    place.apply()
    assert place.calls() == ["stop here-2", "stop here-3"]

    place.destroy(place.stack())
    assert (place.calls(), place.nodes()) == (["stop here-1"], [])
    assert place.workspace.state().get("root_module", {}) in ({}, {"resources": []})


def test_reasons_for_a_replacement(place: Place) -> None:
    place.plan(place.stack())
    place.apply()
    assert place.plan(place.stack(revision="2")) == [("replace", "here-1", "the nodes' settings have changed")]
    (address,) = local_nodes(place.workspace.state()).values()
    assert place.plan(place.stack(), {address: "its process has died"}) == [
        ("replace", "here-1", "its process has died")
    ]
    place.calls()
    place.apply()
    assert place.calls() == ["create here-1", "stop here-1"]


def test_a_pool_that_is_no_longer_declared(place: Place) -> None:
    place.plan(place.stack(pool("a"), pool("b")))
    place.apply()
    place.calls()
    assert place.plan(place.stack(pool("a"))) == [
        ("change", "a-1", "how it is started; it keeps running"),  # with a larger share of the cores
        ("destroy", "b-1", "no longer declared"),
    ]
    place.apply()
    assert place.nodes() == ["a-1"]
    assert place.calls() == [], "Terraform runs no provisioner of a resource whose module is gone"


def test_a_plan_for_another_file_is_refused(place: Place) -> None:
    place.plan(place.stack())
    place.workspace.saved(digest_of(place.stack(), b"file"))
    for other in (digest_of(place.stack(), b"file "), digest_of(place.stack(pool(desired=2)), b"file")):
        with pytest.raises(StalePlan, match=r"another serverless\.yml"):
            place.workspace.saved(other)


def test_no_plan_and_a_changed_plan_are_refused(place: Place) -> None:
    with pytest.raises(StalePlan, match="no saved plan"):
        place.workspace.saved("")
    place.plan(place.stack())
    with (place.workspace.directory / PLAN_FILE).open("ab") as stream:
        stream.write(b"x")
    with pytest.raises(StalePlan, match="not the one that was shown"):
        place.workspace.saved(digest_of(place.stack(), b"file"))


def test_a_plan_whose_state_has_moved_on_is_refused_by_terraform(place: Place) -> None:
    place.plan(place.stack())
    saved = (place.workspace.directory / PLAN_FILE).read_bytes()
    place.apply()
    (place.workspace.directory / PLAN_FILE).write_bytes(saved)
    with pytest.raises(StalePlan, match="state has changed since"):
        place.apply()


def test_a_creation_that_fails_half_way_converges(place: Place) -> None:
    (place.state / "fail-here-2").touch()
    place.plan(place.stack(pool(desired=3)))
    with pytest.raises(TerraformFailed, match="here-2 can't start: no such model"):
        place.apply()
    assert place.nodes() == ["here-1", "here-2", "here-3"], "what was made is in the state, the failed one as tainted"
    (place.state / "fail-here-2").unlink()
    assert place.plan(place.stack(pool(desired=3))) == [("replace", "here-2", "its creation did not end well")]
    place.calls()
    place.apply()
    assert "create here-2" in place.calls()
    assert place.plan(place.stack(pool(desired=3))) == []


def test_a_lock_of_terraform_is_told_with_its_holder(place: Place) -> None:
    place.plan(place.stack())
    place.apply()
    (place.state / "wait").touch()
    place.plan(place.stack(pool(desired=2)))
    with background_apply(place):
        with pytest.raises(StateLocked, match=r"the state is locked: .*@"):
            place.workspace._terraform.plan("other.tfplan")
        (place.state / "go").touch()
    assert place.nodes() == ["here-1", "here-2"]


def test_two_commands_on_this_host(place: Place) -> None:
    with place.workspace.locked(), pytest.raises(StateLocked, match="another `garnish infra` command"):
        place.plan(place.stack())


class background_apply:
    """Applies on a thread; entered once the program runs, left when terraform has ended."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        self._place.workspace.apply(lambda event: self._begun.set() if event.get("type") == "provision_start" else None)

    def __enter__(self) -> None:
        self._thread.start()
        assert self._begun.wait(30)

    def __exit__(self, *error: object) -> None:
        (self._place.state / "go").touch()
        self._thread.join(60)
        assert not self._thread.is_alive()


APPLY = """
import sys
from pathlib import Path
from infra.terraform import find_program
from infra.workspace import Workspace
from infra.errors import Interrupted
def tell(event):
    print(event["type"], flush=True)
try:
    Workspace(Path(sys.argv[1]), find_program()).apply(tell)
except Interrupted as error:
    print(f"Interrupted: {error}", flush=True)
    sys.exit(130)
"""


@pytest.fixture
def applying(place: Place) -> Iterator[subprocess.Popen[str]]:
    """An apply in a process of its own, in the midst of a creation."""
    (place.state / "wait").touch()
    place.plan(place.stack(pool(desired=2)))
    command = [sys.executable, "-c", APPLY, str(place.workspace.directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_ctrl_c_is_passed_on_and_the_state_stays_good(
    place: Place, applying: subprocess.Popen[str], number: signal.Signals
) -> None:
    """And so is the end of the terminal."""
    assert applying.stdout is not None
    for line in applying.stdout:
        if line.strip() == "provision_start":
            break
    for _ in range(3):  # as people do
        applying.send_signal(number)
    rest = applying.stdout.read()
    assert applying.wait(60) == 130, rest
    assert "Interrupted: " in rest
    json.loads((place.workspace.directory / "terraform.tfstate").read_text())
    (place.state / "wait").unlink()
    place.plan(place.stack(pool(desired=2)))
    place.apply()
    assert place.nodes() == ["here-1", "here-2"]
    assert place.plan(place.stack(pool(desired=2))) == []


def test_who_can_not_be_told_ends_it_as_ctrl_c_does(place: Place) -> None:
    """As when its output goes to `head`: terraform must not die of that, for its state would not be saved."""
    (place.state / "wait").touch()
    place.plan(place.stack())

    def tell(event: Event) -> None:
        if event["type"] == "provision_start":
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        place.workspace.apply(tell)
    assert not (place.workspace.directory / ".terraform.tfstate.lock.info").exists(), "it ended in its own way"
    (place.state / "wait").unlink()
    planned = place.plan(place.stack())
    assert planned == [("replace", "here-1", "its creation did not end well")], "the state knows of it"


IGNORING = """
import signal, sys
from pathlib import Path
from infra.terraform import find_program
from infra.workspace import Workspace
signal.signal(signal.SIGHUP, signal.SIG_IGN)
Workspace(Path(sys.argv[1]), find_program()).apply(lambda event: print(event["type"], flush=True))
"""


def test_what_is_to_outlive_its_terminal_does(place: Place) -> None:
    """By `nohup`."""
    (place.state / "wait").touch()
    place.plan(place.stack())
    command = [sys.executable, "-c", IGNORING, str(place.workspace.directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip() == "provision_start":
                break
        process.send_signal(signal.SIGHUP)
        (place.state / "go").touch()
        process.stdout.read()
        assert process.wait(60) == 0
    assert place.plan(place.stack()) == []


LONGER = """
import signal, sys
from pathlib import Path
from infra.errors import Interrupted
from infra.terraform import find_program
from infra.workspace import Workspace
came = []
signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
try:
    Workspace(Path(sys.argv[1]), find_program()).apply(lambda event: print(event["type"], flush=True))
except Interrupted:
    print(f"came: {len(came)}", flush=True)
"""


def test_a_program_that_goes_on_hears_of_it_too(place: Place) -> None:
    (place.state / "wait").touch()
    place.plan(place.stack(pool(desired=1)))
    command = [sys.executable, "-c", LONGER, str(place.workspace.directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip() == "provision_start":
                break
        process.terminate()
        assert "came: 1" in process.stdout.read()


def on_s3(place: Place, bucket: str, desired: int) -> Stack:
    """moto's server wants paths and has no accounts: only that differs from what is rendered."""
    override = {
        "use_path_style": True, "skip_credentials_validation": True, "skip_requesting_account_id": True,
        "skip_region_validation": True, "skip_metadata_api_check": True, "skip_s3_checksum": True,
    }  # fmt: skip
    made = msgspec.structs.replace(place.stack(pool(desired=desired)), state=S3Place(bucket, "garnish"))
    backend = {**render(made)["terraform"]["backend"]["s3"], **override}
    text = json.dumps({"terraform": {"backend": {"s3": backend}}})
    (place.workspace.directory / "moto_override.tf.json").write_text(text)
    return made


def test_a_state_on_s3_is_kept_and_locked_there(place: Place, s3_endpoint: str) -> None:
    boto3.client("s3").create_bucket(Bucket="acme-tf")
    place.workspace.directory.mkdir(parents=True)

    def far(desired: int) -> Stack:
        return on_s3(place, "acme-tf", desired)

    assert place.plan(far(1)) == [("create", "here-1", "not there yet")]
    place.apply()
    listed = boto3.client("s3").list_objects_v2(Bucket="acme-tf")["Contents"]
    assert [entry["Key"] for entry in listed] == ["garnish/demo/terraform.tfstate"], "the lock is gone"
    assert not (place.workspace.directory / "terraform.tfstate").exists()
    (place.state / "wait").touch()
    place.plan(far(2))
    with background_apply(place), pytest.raises(StateLocked, match=r"the state is locked: .*@"):
        place.workspace._terraform.plan("other.tfplan")
    place.destroy(far(0))
    assert place.nodes() == []


def test_a_state_that_lies_elsewhere_is_not_left_there(place: Place, s3_endpoint: str) -> None:
    """Else what it knows of would be made a second time, and never ended."""
    boto3.client("s3").create_bucket(Bucket="acme-moved")
    place.plan(place.stack())
    place.apply()
    with pytest.raises(StateElsewhere, match=r"Set it back, or move the state: `.* init -migrate-state`"):
        place.plan(on_s3(place, "acme-moved", 1))
    (place.workspace.directory / "moto_override.tf.json").unlink()
    assert place.plan(place.stack()) == [], "set back"

    with pytest.raises(StateElsewhere) as told:
        place.plan(on_s3(place, "acme-moved", 1))
    (command,) = re.findall("`(.*)`", str(told.value))
    move = [*shlex.split(command), "-force-copy"]
    subprocess.run(move, env=environment(), check=True, capture_output=True, timeout=60)
    assert place.plan(on_s3(place, "acme-moved", 1)) == [], "moved"


def test_paths_may_hold_what_shells_and_templates_would_read(tmp_path: Path, program: Program) -> None:
    folder = tmp_path / "a $HOME '${x}' %{y} \"z\""
    folder.mkdir()
    place = Place(folder, program)
    place.plan(place.stack())
    place.apply()
    assert place.calls() == ["create here-1"], "the program was told the very path"
    place.destroy(place.stack())
    assert place.calls() == ["stop here-1"]
