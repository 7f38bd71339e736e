"""`garnish infra`: what each command does, between the service file, Terraform and the gateway."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from garnish.client import admin_client
from garnish.config import ServiceFile, load_service_file
from garnish.drain import drain, gpu_fault, known_nodes, undrain
from garnish.errors import FrontDoorError, GarnishError
from garnish.node_pools import check_memory, infra_directory, stack_of
from garnish.pool_status import PoolStatus, Seen, is_instance, pool_statuses, size_told
from garnish.settings import POOL_NODE_STOP_SECONDS
from gateway.routes.nodes import NodeItem
from infra.autoscale.sizes import forget_sizes
from infra.changes import REASONS, Change
from infra.errors import InfraError, StalePlan, StateLocked, Unchanged, raised_as
from infra.processes import NodeKey, running_nodes, service_directory, stop
from infra.stack import Stack, pool_of
from infra.terraform import Event, find_program, missing_credentials
from infra.workspace import PlanNote, Workspace, declared_nodes, digest_of, local_nodes, outputs, tainted_nodes

DRAIN_SECONDS = 600.0
"""Calls that are still open then get the node's own time to end, at TERM."""
DEAD = "its process has died"
FAILED = "its GPU has failed"
STRAY = "no state holds it"
Tell = Callable[[str], None]
Apply = Callable[[Callable[[Event], None]], None]


class Provision:
    """What one command works on: the service file, its stack and the directory where Terraform works."""

    def __init__(self, file: Path, state: Path) -> None:
        self.state = state.absolute()
        self.service: ServiceFile = load_service_file(file)
        with told():
            self.stack: Stack = stack_of(self.service, self.state)
            self.made_for = digest_of(self.stack, file.read_bytes())

    @cached_property
    def workspace(self) -> Workspace:
        """The Terraform workspace of the service's stack. Raises InfraError without a Terraform that is new enough, or
        without credentials and a region that it needs."""
        check_credentials(self.stack)
        home = service_directory(self.state, self.stack.service)
        return Workspace(infra_directory(self.service, self.state), find_program(), home)

    def plan(self, tell: Tell) -> PlanNote:
        with told():
            check_memory(self.service)
        with told(), self.workspace.held():
            tell("preparing terraform")
            self.workspace.open(self.stack)
            tell("planning")
            held = local_nodes(self.workspace.state())
            strays = self._stray_changes(held)
            return self.workspace.plan(self.stack, self.made_for, self._dead(held), strays=strays)

    def apply(self, confirm: Callable[[PlanNote], None], tell: Tell) -> PlanNote:
        """Applies the saved plan; `confirm` is shown it first, and raises to stop. Nodes that go are drained before.
        Raises FrontDoorError."""
        with told():
            check_memory(self.service)
        with told(), self.workspace.held():
            note = self.workspace.saved(self.made_for)
            confirm(note)
            with ended_by_signals():
                self._carry_out(self.workspace.apply, tell, self._drain_what_goes(note, tell))
            return note

    def resize(self, tell: Tell) -> None:
        """Makes the local nodes as many as the stack says, replaces those that are dead or whose GPU has failed, and
        does nothing else; for the autoscaler.

        Raises Unchanged when the plan would also carry out a change that nobody has looked at, or when there can be no
        plan; InfraError when carrying it out fails.
        """
        with ExitStack() as stack:
            with unchanged():
                stack.enter_context(self.workspace.held())
                self._plan_resize()
            self._carry_out(self.workspace.apply_sizes, tell, [])

    def _plan_resize(self) -> None:
        self.workspace.open(self.stack)
        values = self.workspace.state()
        made = outputs(values, "pools") or {}
        for pool in self.stack.local_pools:
            if pool.name not in made:
                raise InfraError(f"node_pools.{pool.name} was not made yet: run `garnish infra plan` and `apply`")
        changes = self.workspace.plan_sizes(self.stack, self._dead(local_nodes(values)))
        other = [change for change in changes if not _of_size(change)]
        if other:
            raise InfraError(
                f"{other[0].action} of {other[0].resource} ({other[0].reason}) was not applied yet: run "
                "`garnish infra plan` and `apply` before sizes can change"
            )

    def destroy(self, confirm: Callable[[PlanNote], None], tell: Tell, *, force: bool) -> PlanNote:
        """Destroys everything, after the nodes have been drained; `force`: also where they can't be. Raises
        FrontDoorError."""
        with told(), self.workspace.held():
            tell("preparing terraform")
            self.workspace.open(self.stack)
            values = self.workspace.state()
            strays = self._stray_changes(local_nodes(values))
            note = self.workspace.plan(self.stack, self.made_for, destroy=True, strays=strays)
            if note.changes:
                confirm(note)
            with ended_by_signals():
                drained = self._drain_all(values, tell, force) if note.changes else []
                self._carry_out(self.workspace.apply, tell, drained)
            forget_sizes(self.workspace.directory)
            return note

    def show(self) -> list[PoolStatus]:
        with told(), self.workspace.held():
            self.workspace.open(self.stack)
            values = self.workspace.state()
        held = local_nodes(values)
        alive = {key.node for key in self._running(held)}
        applied = outputs(values, "pools") or {}
        states = {name: _state_told(node) for name, node in self._seen_nodes().items()}
        return pool_statuses(self.stack, Seen(applied, held, tainted_nodes(values), alive, states))

    def sizes_told(self) -> list[str]:
        """Returns one line per pool whose size the autoscaler has set: the plan keeps that size."""
        told = [f"node_pools.{pool.name}: {size_told(pool)}" for pool in self.stack.pools if pool.stated is not None]
        return [f"{line}; the plan keeps that, until `desired` is edited" for line in told]

    def _dead(self, held: Mapping[str, str]) -> dict[str, str]:
        """Returns the addresses of nodes in the state that should go on but whose process has ended, or whose GPU has
        failed; with what became of them."""
        alive = {key.node for key in self._running(held)}
        failed = {node for node, known in self._seen_nodes().items() if gpu_fault(known)} if alive else set()
        wanted = set(declared_nodes(self.stack))
        gone = {node: DEAD if node not in alive else FAILED for node in wanted if node not in alive or node in failed}
        return {address: gone[node] for node, address in held.items() if node in gone}

    def _running(self, nodes: Iterable[str]) -> list[NodeKey]:
        keys = [
            NodeKey(state=str(self.state), service=self.stack.service, pool=pool_of(node), node=node) for node in nodes
        ]
        return list(running_nodes(self.state, self.stack.service, keys))

    def _carry_out(self, apply: Apply, tell: Tell, drained: list[str]) -> None:
        begun, ends_strays = set[str](), True

        def follow(event: Event) -> None:
            if event.get("type") == "provision_start":  # `apply_start` comes also where an interrupt lets nothing begin
                begun.add(_name_in(event))
            _progress(event, tell)

        try:
            apply(follow)
        except BaseException as error:
            ends_strays = not isinstance(error, (StateLocked, StalePlan))  # who holds the state may be making nodes
            self._undrain([node for node in drained if node not in begun])
            raise
        finally:
            if ends_strays:
                self._end_strays(tell)

    def _undrain(self, nodes: list[str]) -> None:
        if nodes:
            with admin_client(self.state) as client:
                undrain(client, nodes)

    def _strays(self, held: Collection[str]) -> list[NodeKey]:
        """Returns the nodes of this service's pools that run and that the state does not hold: of a creation that
        failed, or of a state that was lost."""
        return sorted((key for key in self._running(()) if key.node not in held), key=lambda key: key.node)

    def _stray_changes(self, held: Collection[str]) -> list[Change]:
        return [
            Change(action="destroy", pool=key.pool, resource=key.node, address="", reason=STRAY, cost=False)
            for key in self._strays(held)
        ]

    def _end_strays(self, tell: Tell) -> None:
        for key in self._strays(local_nodes(self.workspace.state())):
            tell(f"{key.node}: ending a process that no state holds")
            stop(key, POOL_NODE_STOP_SECONDS)

    def _drain_what_goes(self, note: PlanNote, tell: Tell) -> list[str]:
        going = [change.resource for change in note.changes if change.action in ("destroy", "replace")]
        try:
            if going:
                with admin_client(self.state) as client:
                    return drain(client, going, DRAIN_SECONDS, tell)
        except GarnishError as error:
            tell(f"the gateway can't drain {', '.join(going)} ({error.type}); they drain at their own end")
        return []

    def _drain_all(self, values: dict[str, Any], tell: Tell, force: bool) -> list[str]:
        nodes, in_aws = local_nodes(values), self._pools_in_aws(values)
        running = {key.node for key in self._running(nodes)}
        if not in_aws and not running:
            return []
        try:
            with admin_client(self.state) as client:
                own = {node for node in known_nodes(client) if node in running or _is_of(node, in_aws)}
                return drain(client, own, DRAIN_SECONDS, tell)
        except GarnishError as error:
            if not force:
                raise FrontDoorError(
                    f"the nodes can't be drained, for the gateway does not answer as it should ({error}); "
                    "nothing was destroyed. --force destroys without it"
                ) from error
            tell(f"not drained: {error}")
            return []

    def _pools_in_aws(self, values: dict[str, Any]) -> set[str]:
        """Returns the names of the pools in AWS that are declared, or were and are still there."""
        made = outputs(values, "pools") or {}
        return {pool.name for pool in self.stack.aws_pools} | {
            name for name, known in made.items() if known["backend"] == "aws"
        }

    def _seen_nodes(self) -> dict[str, NodeItem]:
        """Returns the nodes as the gateway sees them, by id; empty where it can't be asked."""
        try:
            with admin_client(self.state) as client:
                return known_nodes(client)
        except GarnishError:
            return {}


def check_credentials(stack: Stack) -> None:
    """Raises InfraError where AWS credentials or a region are needed and missing. They are named here, before terraform
    looks in vain for minutes; their values are never read."""
    if stack.aws is None and stack.state is None:
        return
    import boto3
    from botocore.exceptions import BotoCoreError

    try:
        session = boto3.Session()
        found = session.get_credentials()
    except BotoCoreError as error:  # a profile that is nowhere, half of a key
        raise InfraError(f"AWS credentials can't be used: {error}") from error
    if found is None:
        raise InfraError(missing_credentials())
    if stack.state is not None and session.region_name is None:
        raise InfraError("infra.state: the bucket's region is missing: set AWS_REGION, or a region in the profile")


def render_to(file: Path, state: Path, out: Path) -> list[Path]:
    """Writes the root module into `out`, for people who run Terraform themselves; returns the files. Needs no
    terraform."""
    from infra.render import write_root

    service = load_service_file(file)
    with told():
        write_root(stack_of(service, state.absolute()), out)
    return sorted(path for path in out.rglob("*") if path.is_file() and path.suffix in (".tf", ".json", ".tftpl"))


def told() -> AbstractContextManager[None]:
    """Raises failures of `infra` as FrontDoorError, which the command line shows in one line."""
    return raised_as(FrontDoorError, InfraError)


def unchanged() -> AbstractContextManager[None]:
    """Raises failures as Unchanged: nothing was changed before them."""
    return raised_as(Unchanged, FrontDoorError, InfraError)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Makes TERM and HUP end the block as Ctrl-C does: nodes that were drained serve again. One that is ignored (by
    `nohup`) stays so."""
    numbers = (signal.SIGTERM, signal.SIGHUP) if threading.current_thread() is threading.main_thread() else ()
    taken = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _progress(event: dict[str, Any], tell: Tell) -> None:
    """Tells one line for a resource that begins, ends or fails; and for long ones that they go on."""
    hook, name = event.get("hook") or {}, _name_in(event)
    action = hook.get("action", "").replace("delete", "destroy")  # one word for it everywhere
    seconds = hook.get("elapsed_seconds", 0)
    match event.get("type"):
        case "apply_start":
            tell(f"{name}: {action}")
        case "apply_progress":
            tell(f"{name}: {action} for {seconds} s")
        case "apply_complete":
            tell(f"{name}: {action} done")
        case "apply_errored":
            tell(f"{name}: {action} failed")


def _name_in(event: dict[str, Any]) -> str:
    """Returns the name of the resource that an event of Terraform is about: a node's id, or its address; empty when the
    event names none."""
    resource = (event.get("hook") or {}).get("resource") or {}
    return str(resource.get("resource_key") or resource.get("addr", ""))


def _state_told(node: NodeItem) -> str:
    return f"{node.record['state']} ({FAILED})" if gpu_fault(node) else str(node.record["state"])


def _of_size(change: Change) -> bool:
    """Whether the change only makes or ends nodes of local pools, by their number or because they, or their GPU, have
    died."""
    if "terraform_data.node[" not in change.address:
        return False
    return change.action == "create" or change.reason in (DEAD, FAILED, REASONS["delete_because_each_key"])


def _is_of(node: str, pools: Iterable[str]) -> bool:
    return any(is_instance(node, pool) for pool in pools)
