"""Reconciles a service with its service file: tenants, functions and aliases.

First a plan is made, by reading from the service and hashing the adapters' files. Nothing changes until the plan is
carried out. Tenants, functions and aliases that the file does not declare are not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from garnish.adapter_folder import AdapterFiles
from garnish.client import Client
from garnish.config import ServiceFile, tenant_names, tenant_of
from garnish.errors import GarnishError
from garnish.service_file import Function
from gateway.routes.deploy import DeployReply


class Connect(Protocol):
    def __call__(self, tenant: str | None, *, admin: bool = False) -> Client:
        """Returns a client that acts for the tenant, with the administrator's key if `admin` is True."""


class FunctionStep(msgspec.Struct, frozen=True):
    """Change that one function needs; `action` is the kind of the change.

    `create`: the adapter becomes a new version. `move`: the adapter is a version already, and the alias must be pointed
    to this version. `set`: only the function's policy changes. The policy may change with `create` and `move` too.
    """

    tenant: str
    function: str
    alias: str
    action: Literal["create", "move", "set", "none"]
    version: int | None
    points_to: int | dict[str, float] | None
    adapter: str
    policy: dict[str, Any] = {}

    def __str__(self) -> str:
        return f"{self._deployed()}; policy: {', '.join(self.policy)}" if self.policy else self._deployed()

    def _deployed(self) -> str:
        name = f"function {self.tenant}/{self.function}"
        now = "nothing" if self.points_to is None else f"version {_target(self.points_to)}"
        match self.action:
            case "create":
                return f"{name}: create a version, and move {self.alias} to it (from {now})"
            case "move":
                return f"{name}: move {self.alias} to version {self.version} (from {now})"
            case "set":
                return f"{name}: {self.alias} is version {self.version}"
            case _:
                return f"{name}: nothing to do, {self.alias} is version {self.version}"


class TenantStep(msgspec.Struct, frozen=True):
    """Change that one tenant needs; `action` is the kind of the change.

    `change`: the tenant's settings differ from the file. `later`: they differ too, but the tenant is declared in the
    gateway's service file, which the gateway applies at its next start.
    """

    tenant: str
    action: Literal["create", "change", "later", "none"]
    changed: list[str] = []
    settings: dict[str, Any] = {}

    def __str__(self) -> str:
        actions = {
            "create": "create",
            "change": f"change {', '.join(self.changed)}",
            "later": "is taken from the gateway's own serverless.yml at its next start",
            "none": "nothing to do",
        }
        return f"tenant {self.tenant}: {actions[self.action]}"


class Plan(msgspec.Struct, frozen=True):
    tenants: list[TenantStep]
    functions: list[FunctionStep]

    @property
    def steps(self) -> list[TenantStep | FunctionStep]:
        return [*self.tenants, *self.functions]

    @property
    def changes(self) -> int:
        return sum(step.action not in ("none", "later") for step in self.steps)


def make_plan(service: ServiceFile, connect: Connect, *, administers: bool) -> Plan:
    """Compares the service file's functions and tenants with the service, and returns the plan.

    `administers` is True if there is an administrator's key. Raises GarnishError.
    """
    tenants: list[TenantStep] = []
    if administers:
        tenants = [_plan_tenant(service, connect, name) for name in tenant_names(service)]
    new = {step.tenant for step in tenants if step.action == "create"}
    functions = []
    for name, function in service.functions.items():
        tenant, files = tenant_of(service, function), service.adapter_files(name)
        functions.append(_plan_function(connect, name, function, files, tenant=tenant, new_tenant=tenant in new))
    return Plan(tenants, functions)


def carry_out(plan: Plan, connect: Connect, report: Callable[[str], None]) -> Iterator[DeployReply]:
    """Carries out the changes one by one, and yields the reply of each deploy.

    `report` is called with a text before each change. Raises GarnishError; changes before the failed one stay.
    """
    for step in plan.tenants:
        if step.action in ("create", "change"):
            report(str(step))
            with connect(None, admin=True) as client:
                client.put_tenant(step.tenant, step.settings)
    for entry in plan.functions:
        if entry.action != "none":
            report(str(entry))
            with connect(entry.tenant) as client:
                if entry.action != "set":
                    yield client.deploy(entry.function, Path(entry.adapter), entry.alias)
    for entry in plan.functions:  # once all functions exist, because policies may name others as destinations
        if entry.action != "none" and entry.policy:
            with connect(entry.tenant) as client:
                client.set_policy(entry.function, entry.policy)


def try_out(plan: Plan, connect: Connect, report: Callable[[str], None]) -> Iterator[DeployReply]:
    """Lets the service validate the adapters that would become new versions, without any change.

    Yields the replies. Adapters of tenants that do not exist yet are skipped. Raises GarnishError with the function's
    name for the first adapter that is refused.
    """
    new = {step.tenant for step in plan.tenants if step.action == "create"}
    for entry in plan.functions:
        if entry.action != "create" or entry.tenant in new:
            continue
        report(f"checking {entry.tenant}/{entry.function}")
        try:
            with connect(entry.tenant) as client:
                yield client.deploy(entry.function, Path(entry.adapter), entry.alias, dry_run=True)
        except GarnishError as error:
            message = f"function {entry.tenant}/{entry.function}: {error.message}"
            raise GarnishError(error.type, message, details=error.details, status=error.status) from error


def _plan_tenant(service: ServiceFile, connect: Connect, name: str) -> TenantStep:
    stated = _settings(service, name)
    with connect(name, admin=True) as client:
        try:
            client.functions(limit=1)
        except GarnishError as error:
            if error.type != "not_found":
                raise
            return TenantStep(name, "create", settings=stated)
    if not stated:
        return TenantStep(name, "none")
    with connect(None, admin=True) as client:
        settings = client.tenant(name)
    now = {field: settings[field] for field in ("limits", "slo", "weight", "webhook_hosts", "file_bytes")}
    changed = [field for field in stated if stated[field] != now.get(field)]
    if not changed or settings["declared"]:
        return TenantStep(name, "later" if changed else "none", changed)
    return TenantStep(name, "change", changed, {**now, **stated})


def _plan_function(
    connect: Connect, name: str, function: Function, files: AdapterFiles, *, tenant: str, new_tenant: bool
) -> FunctionStep:
    alias, policy = function.alias or "latest", function.policy()
    hashes = files.sha256()
    version: int | None = None
    points_to: int | dict[str, float] | None = None
    if not new_tenant:
        with connect(tenant) as client:
            try:
                deployed = client.function(name)
                points_to = deployed.aliases.get(alias)
                policy = {field: value for field, value in policy.items() if deployed.policy.get(field) != value}
                versions = client.versions(name).versions
            except GarnishError as error:
                if error.type != "not_found":
                    raise
                versions = []
        same = [entry.version for entry in versions if (entry.config_sha256, entry.weights_sha256) == hashes]
        version = max(same, default=None)
    action: Literal["create", "move", "set", "none"] = "create" if version is None else "move"
    if version is not None and points_to == version:
        action = "set" if policy else "none"
    return FunctionStep(tenant, name, alias, action, version, points_to, str(files.config.parent), policy)


def _settings(service: ServiceFile, tenant: str) -> dict[str, Any]:
    declared = service.tenants.get(tenant)
    stated = {} if declared is None else msgspec.to_builtins(declared)
    return {field: value for field, value in stated.items() if value is not None}


def _target(points_to: int | dict[str, float]) -> str:
    if isinstance(points_to, int):
        return str(points_to)
    return "+".join(f"{version}:{share:g}" for version, share in points_to.items())
