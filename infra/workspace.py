"""The directory of one service's root module: `<infra state>/<service>`, with the saved plan and its purpose."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from infra.changes import Change, changes_of
from infra.errors import InfraError, StalePlan, StateElsewhere, StateLocked
from infra.render import ROOT_FILE, render, text_of, write_root
from infra.stack import Stack, module_name, node_ids
from infra.terraform import Event, Program, Terraform
from infra.text import write_whole

PLAN_FILE = "plan.tfplan"
NOTE_FILE = "plan.json"
SIZE_PLAN_FILE = "size.tfplan"
"""The autoscaler's plans: what somebody has planned and looked at stays saved beside them."""
LOCK_FILE = "garnish.lock"
PLACE_FILE = "place"
"""In a service's own directory, where another one was used last: the path of that."""


class PlanNote(msgspec.Struct, frozen=True, kw_only=True):
    """What lies beside a saved plan: what the plan was made for, and what it does."""

    made_for: str
    """Digest of serverless.yml and the root module rendered from it."""
    plan_sha256: str
    changes: tuple[Change, ...]
    destroy: bool = False


class Workspace:
    """The directory in which Terraform works for a service. To be used inside `held()`: one command at a time works in
    a directory. `home` is the directory of a service file that names no other; the one that was used is noted there."""

    def __init__(self, directory: Path, program: Program, home: Path | None = None) -> None:
        self.directory, self._home = directory, home or directory
        self._terraform = Terraform(program, directory)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Holds the workspace's lock. Raises StateLocked when another command of this host works here."""
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(self.directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise InfraError(f"{self.directory} can't be used: {error.strerror}") from error
        try:
            self._lock(lock)
            yield
        finally:
            os.close(lock)

    def _lock(self, lock: int) -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StateLocked(
                f"another `garnish infra` command, or `garnish autoscale`, works in {self.directory}; try again in a "
                "moment"
            ) from None

    def open(self, stack: Stack) -> None:
        """Writes the root module and lets terraform get ready for it. Raises StateElsewhere."""
        self._check_place()
        write_root(stack, self.directory)
        self._terraform.init()

    def _check_place(self) -> None:
        """Notes that this directory is used. Raises StateElsewhere where another one was used before: without its
        state, all that there is would be made a second time, and never ended."""
        here, home = self.directory.resolve(), self._home.resolve()
        note = home / PLACE_FILE
        try:
            before = Path(note.read_text()) if note.exists() else home
            if before != here and (before / ROOT_FILE).exists():
                old, new = shlex.quote(str(before)), shlex.quote(str(here))
                raise StateElsewhere(f"cp -a {old}/. {new} && rm -r {old}")
            if here != home:
                home.mkdir(mode=0o700, parents=True, exist_ok=True)
                write_whole(note, str(here))
            else:
                note.unlink(missing_ok=True)
        except OSError as error:
            raise InfraError(f"{note}: {error.strerror}") from error

    def plan(
        self,
        stack: Stack,
        made_for: str,
        dead: Mapping[str, str] | None = None,
        *,
        strays: Iterable[Change] = (),
        destroy: bool = False,
    ) -> PlanNote:
        """Makes and saves a plan, and returns its note. `dead` maps addresses to be replaced to what became of their
        process. `strays`, of which Terraform does not know, end, too: beside what it plans, or because it makes them
        anew."""
        self.forget_plan()
        changes = self._planned(PLAN_FILE, stack, dead or {}, destroy=destroy)
        changes = _with_strays(changes, {change.resource: change for change in strays})
        note = PlanNote(made_for=made_for, plan_sha256=self._plan_digest(), changes=tuple(changes), destroy=destroy)
        (self.directory / NOTE_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(note)))
        return note

    def plan_sizes(self, stack: Stack, dead: Mapping[str, str]) -> list[Change]:
        """Makes a plan beside the saved one, for `apply_sizes`, and returns what it would change."""
        return self._planned(SIZE_PLAN_FILE, stack, dead, destroy=False)

    def _planned(self, file: str, stack: Stack, dead: Mapping[str, str], *, destroy: bool) -> list[Change]:
        self._terraform.plan(file, () if destroy else list(dead), destroy=destroy)
        pools = {module_name(pool.name): pool.name for pool in stack.pools}
        return changes_of(self._terraform.show(file), pools, dead, destroy=destroy)

    def saved(self, made_for: str) -> PlanNote:
        """Returns the saved plan's note. Raises StalePlan when there is none, or it was made for something else."""
        try:
            note = msgspec.json.decode((self.directory / NOTE_FILE).read_bytes(), type=PlanNote)
            digest = self._plan_digest()
        except (OSError, msgspec.DecodeError):
            raise StalePlan("there is no saved plan; run `garnish infra plan` first") from None
        if note.destroy or digest != note.plan_sha256:
            raise StalePlan("the saved plan is not the one that was shown; run `garnish infra plan` again")
        if note.made_for != made_for:
            raise StalePlan(
                "the saved plan was made for another serverless.yml, or before the autoscaler changed a size; run "
                "`garnish infra plan` again"
            )
        return note

    def apply(self, on_event: Callable[[Event], None]) -> None:
        """Applies exactly the saved plan, which is used up by that, however it ends."""
        try:
            self._terraform.apply(PLAN_FILE, on_event)
        finally:
            self.forget_plan()

    def apply_sizes(self, on_event: Callable[[Event], None]) -> None:
        """Applies the plan of `plan_sizes`. Terraform refuses the saved plan after that, for the state has changed."""
        self._terraform.apply(SIZE_PLAN_FILE, on_event)

    def forget_plan(self) -> None:
        for name in (PLAN_FILE, NOTE_FILE):
            (self.directory / name).unlink(missing_ok=True)

    def state(self) -> dict[str, Any]:
        """Returns the state's `values`; empty when nothing was ever made."""
        return self._terraform.show().get("values") or {}

    def _plan_digest(self) -> str:
        return hashlib.sha256((self.directory / PLAN_FILE).read_bytes()).hexdigest()


def _with_strays(changes: Iterable[Change], strays: Mapping[str, Change]) -> list[Change]:
    found, anew = [], set[str]()
    for change in changes:
        if change.action == "create" and (stray := strays.get(change.resource)):
            anew.add(change.resource)
            change = msgspec.structs.replace(change, action="replace", reason=stray.reason)
        found.append(change)
    return [*found, *(change for node, change in strays.items() if node not in anew)]


def digest_of(stack: Stack, file: bytes) -> str:
    """Returns the digest of a plan's inputs: the service file, and all that was made of it and of the environment."""
    return hashlib.sha256(file + b"\0" + text_of(render(stack)).encode()).hexdigest()


def resources(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns all managed resources of a state's `values`, those of modules too."""
    found: list[dict[str, Any]] = []
    pending: list[Mapping[str, Any]] = [values.get("root_module") or {}]
    while pending:
        module = pending.pop()
        found += [entry for entry in module.get("resources", ()) if entry.get("mode") == "managed"]
        pending += module.get("child_modules", ())
    return found


def outputs(values: Mapping[str, Any], name: str) -> Any:
    return ((values.get("outputs") or {}).get(name) or {}).get("value")


def local_nodes(values: Mapping[str, Any]) -> dict[str, str]:
    """Returns the addresses of the local backend's nodes in the state, by node id."""
    return {
        str(entry["index"]): str(entry["address"])
        for entry in resources(values)
        if entry["type"] == "terraform_data" and entry["name"] == "node" and "index" in entry
    }


def tainted_nodes(values: Mapping[str, Any]) -> set[str]:
    """Returns the ids of the local backend's nodes whose creation broke off."""
    broken = {str(entry["address"]) for entry in resources(values) if entry.get("tainted")}
    return {node for node, address in local_nodes(values).items() if address in broken}


def declared_nodes(stack: Stack) -> Sequence[str]:
    """Returns the ids of the local nodes that the stack asks for."""
    return [node for pool in stack.local_pools for node in node_ids(pool.name, pool.desired)]
