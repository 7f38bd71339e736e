"""Manages the directory of a service's root module and saved plan, `<infra state>/<service>`."""

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
from infra.text import write_atomically

PLAN_FILE = "plan.tfplan"
NOTE_FILE = "plan.json"
SIZE_PLAN_FILE = "size.tfplan"
"""File for the autoscaler's plans. The operator's saved plan is another file."""
LOCK_FILE = "garnish.lock"
PLACE_FILE = "place"
"""File in a service's default directory that has the path of the directory used last."""


class SavedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a saved plan: a digest of its inputs, and its changes. The description is stored in a file next to
    the plan."""

    made_for: str
    plan_sha256: str
    changes: tuple[Change, ...]
    destroy: bool = False


class Workspace:
    """Terraform's directory of a service. All other methods must be called within `locked()`.

    `home` is the default directory, in which the path of the directory in use is recorded.
    """

    def __init__(self, directory: Path, program: Program, home: Path | None = None) -> None:
        self.directory, self._home = directory, home or directory
        self._terraform = Terraform(program, directory)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the workspace's lock while the context runs.

        Raises StateLocked if another command on this host holds it.
        """
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
        """Writes the root module, and initialises terraform in the directory. Raises StateElsewhere."""
        self._check_place()
        write_root(stack, self.directory)
        self._terraform.init()

    def _check_place(self) -> None:
        """Records that this directory is used. Raises StateElsewhere if another directory was used before.

        Terraform's state is in that other directory. Without it all resources would be created a second time, and the
        first ones would never be destroyed.
        """
        here, home = self.directory.resolve(), self._home.resolve()
        place_file = home / PLACE_FILE
        try:
            before = Path(place_file.read_text()) if place_file.exists() else home
            if before != here and (before / ROOT_FILE).exists():
                old, new = shlex.quote(str(before)), shlex.quote(str(here))
                raise StateElsewhere(f"cp -a {old}/. {new} && rm -r {old}")
            if here != home:
                home.mkdir(mode=0o700, parents=True, exist_ok=True)
                write_atomically(place_file, str(here))
            else:
                place_file.unlink(missing_ok=True)
        except OSError as error:
            raise InfraError(f"{place_file}: {error.strerror}") from error

    def plan(
        self,
        stack: Stack,
        made_for: str,
        dead: Mapping[str, str] | None = None,
        *,
        strays: Iterable[Change] = (),
        destroy: bool = False,
    ) -> SavedPlan:
        """Creates and saves a plan, and returns its description.

        `made_for` is the digest of the plan's inputs (`digest_of`). `dead` maps addresses of failed nodes, which are to
        be replaced, to the causes of their failures. `strays` are running nodes that are not in Terraform's state. They
        are shown as ended, or as replaced if the plan creates a node with the same id.
        """
        self.delete_plan()
        changes = self._make_plan(PLAN_FILE, stack, dead or {}, destroy=destroy)
        changes = _with_strays(changes, {change.resource: change for change in strays})
        saved = SavedPlan(made_for=made_for, plan_sha256=self._plan_digest(), changes=tuple(changes), destroy=destroy)
        (self.directory / NOTE_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(saved)))
        return saved

    def plan_sizes(self, stack: Stack, dead: Mapping[str, str]) -> list[Change]:
        """Creates a separate plan for `apply_sizes`, and returns its changes."""
        return self._make_plan(SIZE_PLAN_FILE, stack, dead, destroy=False)

    def _make_plan(self, file: str, stack: Stack, dead: Mapping[str, str], *, destroy: bool) -> list[Change]:
        self._terraform.plan(file, () if destroy else list(dead), destroy=destroy)
        pools = {module_name(pool.name): pool.name for pool in stack.pools}
        return changes_of(self._terraform.show(file), pools, dead, destroy=destroy)

    def saved(self, made_for: str) -> SavedPlan:
        """Returns the saved plan. Raises StalePlan if there is none, or if it was created for other inputs."""
        try:
            saved_plan = msgspec.json.decode((self.directory / NOTE_FILE).read_bytes(), type=SavedPlan)
            digest = self._plan_digest()
        except (OSError, msgspec.DecodeError):
            raise StalePlan("there is no saved plan; run `garnish infra plan` first") from None
        if saved_plan.destroy or digest != saved_plan.plan_sha256:
            raise StalePlan("the saved plan is not the one that was shown; run `garnish infra plan` again")
        if saved_plan.made_for != made_for:
            raise StalePlan(
                "the saved plan was made for another serverless.yml, or before the autoscaler changed a size; run "
                "`garnish infra plan` again"
            )
        return saved_plan

    def apply(self, on_event: Callable[[Event], None]) -> None:
        """Applies exactly the saved plan. The plan is deleted, also after a failure."""
        try:
            self._terraform.apply(PLAN_FILE, on_event)
        finally:
            self.delete_plan()

    def apply_sizes(self, on_event: Callable[[Event], None]) -> None:
        """Applies the plan of `plan_sizes`.

        Afterwards Terraform refuses the operator's saved plan, since the state has changed.
        """
        self._terraform.apply(SIZE_PLAN_FILE, on_event)

    def delete_plan(self) -> None:
        for name in (PLAN_FILE, NOTE_FILE):
            (self.directory / name).unlink(missing_ok=True)

    def state(self) -> dict[str, Any]:
        """Returns the `values` of Terraform's state; empty if nothing was ever created."""
        return self._terraform.show().get("values") or {}

    def _plan_digest(self) -> str:
        return hashlib.sha256((self.directory / PLAN_FILE).read_bytes()).hexdigest()


def _with_strays(changes: Iterable[Change], strays: Mapping[str, Change]) -> list[Change]:
    merged, recreated = [], set[str]()
    for change in changes:
        if change.action == "create" and (stray := strays.get(change.resource)):
            recreated.add(change.resource)
            change = msgspec.structs.replace(change, action="replace", reason=stray.reason)
        merged.append(change)
    return [*merged, *(change for node, change in strays.items() if node not in recreated)]


def digest_of(stack: Stack, file: bytes) -> str:
    """Returns the digest of a plan's inputs: the service file and the rendered root module."""
    return hashlib.sha256(file + b"\0" + text_of(render(stack)).encode()).hexdigest()


def resources(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns all managed resources in a state's `values`, including those of modules."""
    managed: list[dict[str, Any]] = []
    pending: list[Mapping[str, Any]] = [values.get("root_module") or {}]
    while pending:
        module = pending.pop()
        managed += [entry for entry in module.get("resources", ()) if entry.get("mode") == "managed"]
        pending += module.get("child_modules", ())
    return managed


def outputs(values: Mapping[str, Any], name: str) -> Any:
    return ((values.get("outputs") or {}).get(name) or {}).get("value")


def local_nodes(values: Mapping[str, Any]) -> dict[str, str]:
    """Returns the Terraform addresses of the local backend's nodes in the state, by node id."""
    return {
        str(entry["index"]): str(entry["address"])
        for entry in resources(values)
        if entry["type"] == "terraform_data" and entry["name"] == "node" and "index" in entry
    }


def tainted_nodes(values: Mapping[str, Any]) -> set[str]:
    """Returns the ids of the local backend's nodes whose creation was interrupted."""
    broken = {str(entry["address"]) for entry in resources(values) if entry.get("tainted")}
    return {node for node, address in local_nodes(values).items() if address in broken}


def declared_nodes(stack: Stack) -> Sequence[str]:
    """Returns the ids of the local nodes that the stack declares."""
    return [node for pool in stack.local_pools for node in node_ids(pool.name, pool.desired)]
