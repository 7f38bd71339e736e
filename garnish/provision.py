"""The commands of `garnish infra`. They use the service file, Terraform and the gateway."""

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
from garnish.node_pools import infra_directory, stack_of
from garnish.pool_memory import check_memory
from garnish.pool_status import Observed, PoolStatus, format_size, is_instance, pool_statuses
from garnish.settings import POOL_NODE_STOP_SECONDS
from gateway.routes.nodes import NodeItem
from infra.autoscale.sizes import delete_sizes
from infra.changes import REASONS, Change
from infra.errors import InfraError, StalePlan, StateLocked, Unchanged, raised_as
from infra.processes import NodeKey, running_nodes, service_directory, stop
from infra.stack import Stack, pool_of
from infra.terraform import Event, find_program, missing_credentials
from infra.workspace import SavedPlan, Workspace, declared_nodes, digest_of, local_nodes, outputs, tainted_nodes

DRAIN_SECONDS = 600.0
"""Maximum seconds of draining.

Calls that are still open after this time can finish within the node's grace period after TERM.
"""
DEAD = "its process has died"
FAILED = "its GPU has failed"
STRAY = "no state holds it"
Report = Callable[[str], None]
Apply = Callable[[Callable[[Event], None]], None]


class Provision:
    """State of one `garnish infra` command: the service file, its stack and Terraform's directory."""

    def __init__(self, file: Path, state: Path) -> None:
        self.state = state.absolute()
        self.service: ServiceFile = load_service_file(file)
        with infra_errors_as_cli_errors():
            self.stack: Stack = stack_of(self.service, self.state)
            self.made_for = digest_of(self.stack, file.read_bytes())

    @cached_property
    def workspace(self) -> Workspace:
        """The Terraform workspace of the service's stack.

        Raises InfraError if no sufficiently new Terraform is installed, or if AWS credentials or a region are needed
        and missing.
        """
        check_credentials(self.stack)
        home = service_directory(self.state, self.stack.service)
        return Workspace(infra_directory(self.service, self.state), find_program(), home)

    def plan(self, report: Report) -> SavedPlan:
        with infra_errors_as_cli_errors():
            check_memory(self.service, self.state)
        with infra_errors_as_cli_errors(), self.workspace.locked():
            report("preparing terraform")
            self.workspace.open(self.stack)
            report("planning")
            addresses = local_nodes(self.workspace.state())
            strays = self._stray_changes(addresses)
            return self.workspace.plan(self.stack, self.made_for, self._dead(addresses), strays=strays)

    def apply(self, confirm: Callable[[SavedPlan], None], report: Report) -> SavedPlan:
        """Applies the saved plan, after draining the nodes that the plan ends. Returns the plan.

        `confirm` is called with the plan first; it raises an exception to cancel. Raises FrontDoorError.
        """
        with infra_errors_as_cli_errors():
            check_memory(self.service, self.state)
        with infra_errors_as_cli_errors(), self.workspace.locked():
            plan = self.workspace.saved(self.made_for)
            confirm(plan)
            with ended_by_signals():
                self._carry_out(self.workspace.apply, report, self._drain_what_goes(plan, report))
            return plan

    def resize_local_pools(self, report: Report) -> None:
        """Creates and ends local nodes until their number is that of the stack, for the autoscaler.

        Nodes that are dead or whose GPU has failed are replaced. Raises Unchanged if no plan can be made. Raises it
        also if the plan contains other changes, which an operator must see first. Raises InfraError if applying the
        plan fails.
        """
        with ExitStack() as stack:
            with unchanged():
                stack.enter_context(self.workspace.locked())
                self._plan_resize()
            self._carry_out(self.workspace.apply_sizes, report, [])

    def _plan_resize(self) -> None:
        self.workspace.open(self.stack)
        values = self.workspace.state()
        applied = outputs(values, "pools") or {}
        for pool in self.stack.local_pools:
            if pool.name not in applied:
                raise InfraError(f"node_pools.{pool.name} does not exist yet: run `garnish infra plan` and `apply`")
        changes = self.workspace.plan_sizes(self.stack, self._dead(local_nodes(values)))
        unrelated = [change for change in changes if not _of_size(change)]
        if unrelated:
            raise InfraError(
                f"{unrelated[0].action} of {unrelated[0].resource} ({unrelated[0].reason}) was not applied yet: run "
                "`garnish infra plan` and `apply` before sizes can change"
            )

    def destroy(self, confirm: Callable[[SavedPlan], None], report: Report, *, force: bool) -> SavedPlan:
        """Destroys all resources of the service's pools, after draining the nodes. Returns the applied plan.

        `confirm` is as for `apply`. With `force` resources are destroyed even if nodes can't be drained. Raises
        FrontDoorError if anything fails.
        """
        with infra_errors_as_cli_errors(), self.workspace.locked():
            report("preparing terraform")
            self.workspace.open(self.stack)
            values = self.workspace.state()
            strays = self._stray_changes(local_nodes(values))
            plan = self.workspace.plan(self.stack, self.made_for, destroy=True, strays=strays)
            if plan.changes:
                confirm(plan)
            with ended_by_signals():
                drained = self._drain_all(values, report, force) if plan.changes else []
                self._carry_out(self.workspace.apply, report, drained)
            delete_sizes(self.workspace.directory)
            return plan

    def show(self) -> list[PoolStatus]:
        with infra_errors_as_cli_errors(), self.workspace.locked():
            self.workspace.open(self.stack)
            values = self.workspace.state()
        managed = local_nodes(values)
        alive = {key.node for key in self._running(managed)}
        applied = outputs(values, "pools") or {}
        states = {name: _format_state(node) for name, node in self._reported_nodes().items()}
        return pool_statuses(self.stack, Observed(applied, managed, tainted_nodes(values), alive, states))

    def format_pool_sizes(self) -> list[str]:
        """Returns a line for each pool whose size was set by the autoscaler. The plan keeps these sizes."""
        sizes = [f"node_pools.{pool.name}: {format_size(pool)}" for pool in self.stack.pools if pool.stated is not None]
        return [f"{line}; the plan keeps that, until `desired` is edited" for line in sizes]

    def _dead(self, addresses: Mapping[str, str]) -> dict[str, str]:
        """Returns the cause of failure of each failed node, by the node's Terraform address.

        These are declared nodes whose process has ended or whose GPU has failed. `addresses` has the Terraform
        addresses of the nodes in the state, by node id.
        """
        alive = {key.node for key in self._running(addresses)}
        failed = {node for node, item in self._reported_nodes().items() if gpu_fault(item)} if alive else set()
        declared = set(declared_nodes(self.stack))
        causes = {
            node: DEAD if node not in alive else FAILED for node in declared if node not in alive or node in failed
        }
        return {address: causes[node] for node, address in addresses.items() if node in causes}

    def _running(self, nodes: Iterable[str]) -> list[NodeKey]:
        keys = [
            NodeKey(state=str(self.state), service=self.stack.service, pool=pool_of(node), node=node) for node in nodes
        ]
        return list(running_nodes(self.state, self.stack.service, keys))

    def _carry_out(self, apply: Apply, report: Report, drained: list[str]) -> None:
        started, ends_strays = set[str](), True

        def follow(event: Event) -> None:
            if event.get("type") == "provision_start":  # `apply_start` also comes if an interrupt prevents any change
                started.add(_name_in(event))
            _progress(event, report)

        try:
            apply(follow)
        except BaseException as error:
            ends_strays = not isinstance(error, (StateLocked, StalePlan))  # another command may be creating nodes
            self._undrain([node for node in drained if node not in started])
            raise
        finally:
            if ends_strays:
                self._end_strays(report)

    def _undrain(self, nodes: list[str]) -> None:
        if nodes:
            with admin_client(self.state) as client:
                undrain(client, nodes)

    def _strays(self, managed: Collection[str]) -> list[NodeKey]:
        """Returns the running nodes of this service's pools that are not in Terraform's state (`managed`).

        They remain after a failed creation, or after the loss of a state.
        """
        return sorted((key for key in self._running(()) if key.node not in managed), key=lambda key: key.node)

    def _stray_changes(self, managed: Collection[str]) -> list[Change]:
        return [
            Change(action="destroy", pool=key.pool, resource=key.node, address="", reason=STRAY, cost=False)
            for key in self._strays(managed)
        ]

    def _end_strays(self, report: Report) -> None:
        for key in self._strays(local_nodes(self.workspace.state())):
            report(f"{key.node}: ending a process that no state holds")
            stop(key, POOL_NODE_STOP_SECONDS)

    def _drain_what_goes(self, plan: SavedPlan, report: Report) -> list[str]:
        going = [change.resource for change in plan.changes if change.action in ("destroy", "replace")]
        try:
            if going:
                with admin_client(self.state) as client:
                    return drain(client, going, DRAIN_SECONDS, report)
        except GarnishError as error:
            report(f"the gateway can't drain {', '.join(going)} ({error.type}); they drain at their own end")
        return []

    def _drain_all(self, values: dict[str, Any], report: Report, force: bool) -> list[str]:
        nodes, in_aws = local_nodes(values), self._pools_in_aws(values)
        running = {key.node for key in self._running(nodes)}
        if not in_aws and not running:
            return []
        try:
            with admin_client(self.state) as client:
                ours = {node for node in known_nodes(client) if node in running or _is_of(node, in_aws)}
                return drain(client, ours, DRAIN_SECONDS, report)
        except GarnishError as error:
            if not force:
                raise FrontDoorError(
                    f"the nodes can't be drained, since the gateway gives no valid answer ({error}); "
                    "nothing was destroyed. --force destroys without it"
                ) from error
            report(f"not drained: {error}")
            return []

    def _pools_in_aws(self, values: dict[str, Any]) -> set[str]:
        """Returns the names of the pools in AWS that are declared or still exist."""
        applied = outputs(values, "pools") or {}
        return {pool.name for pool in self.stack.aws_pools} | {
            name for name, pool in applied.items() if pool["backend"] == "aws"
        }

    def _reported_nodes(self) -> dict[str, NodeItem]:
        """Returns the gateway's nodes by id; empty if the gateway does not answer."""
        try:
            with admin_client(self.state) as client:
                return known_nodes(client)
        except GarnishError:
            return {}


def check_credentials(stack: Stack) -> None:
    """Raises InfraError if AWS credentials or a region are needed and missing.

    Without this check Terraform would search for them for minutes. Their values are never read.
    """
    if stack.aws is None and stack.state is None:
        return
    import boto3
    from botocore.exceptions import BotoCoreError

    try:
        session = boto3.Session()
        credentials = session.get_credentials()
    except BotoCoreError as error:  # for example a missing profile, or an incomplete key
        raise InfraError(f"AWS credentials can't be used: {error}") from error
    if credentials is None:
        raise InfraError(missing_credentials())
    if stack.state is not None and session.region_name is None:
        raise InfraError("infra.state: the bucket's region is missing: set AWS_REGION, or a region in the profile")


def render_to(file: Path, state: Path, out: Path) -> list[Path]:
    """Writes the root module into `out`, for users who run Terraform themselves. Returns the written files.

    Terraform need not be installed.
    """
    from infra.render import write_root

    service = load_service_file(file)
    with infra_errors_as_cli_errors():
        write_root(stack_of(service, state.absolute()), out)
    return sorted(path for path in out.rglob("*") if path.is_file() and path.suffix in (".tf", ".json", ".tftpl"))


def infra_errors_as_cli_errors() -> AbstractContextManager[None]:
    """Converts InfraError into FrontDoorError while the context runs. The command line prints a FrontDoorError as one
    line."""
    return raised_as(FrontDoorError, InfraError)


def unchanged() -> AbstractContextManager[None]:
    """Converts FrontDoorError and InfraError into Unchanged while the context runs."""
    return raised_as(Unchanged, FrontDoorError, InfraError)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Makes TERM and HUP interrupt the context like Ctrl-C, so that drained nodes are undrained.

    A signal that is ignored (by `nohup`) stays ignored.
    """
    numbers = (signal.SIGTERM, signal.SIGHUP) if threading.current_thread() is threading.main_thread() else ()
    handled = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    for number in handled:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)


def _progress(event: dict[str, Any], report: Report) -> None:
    """Reports a line for an event: when a resource's change starts, ends, fails, or takes long."""
    hook, name = event.get("hook") or {}, _name_in(event)
    action = hook.get("action", "").replace("delete", "destroy")  # the same word as in the plan
    seconds = hook.get("elapsed_seconds", 0)
    match event.get("type"):
        case "apply_start":
            report(f"{name}: {action}")
        case "apply_progress":
            report(f"{name}: {action} for {seconds} s")
        case "apply_complete":
            report(f"{name}: {action} done")
        case "apply_errored":
            report(f"{name}: {action} failed")


def _name_in(event: dict[str, Any]) -> str:
    """Returns the name of the resource in an event of Terraform; empty if the event has no resource.

    The name is a node's id, else the resource's address.
    """
    resource = (event.get("hook") or {}).get("resource") or {}
    return str(resource.get("resource_key") or resource.get("addr", ""))


def _format_state(node: NodeItem) -> str:
    return f"{node.record['state']} ({FAILED})" if gpu_fault(node) else str(node.record["state"])


def _of_size(change: Change) -> bool:
    """Returns True if the change creates or ends a local node because of its pool's size or its own failure."""
    if "terraform_data.node[" not in change.address:
        return False
    return change.action == "create" or change.reason in (DEAD, FAILED, REASONS["delete_because_each_key"])


def _is_of(node: str, pools: Iterable[str]) -> bool:
    return any(is_instance(node, pool) for pool in pools)
