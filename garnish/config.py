"""Reads and checks serverless.yml. Every error names the file, the line, the field and what was expected."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec

from adapters.errors import InvalidRequest
from adapters.functions import Policy, parse_policy
from adapters.names import is_alias, is_name
from adapters.nearest import nearest
from adapters.open_store import store_kind
from adapters.sources import check_source
from cluster.redis_url import url_problem
from garnish.adapter_folder import AdapterFiles, adapter_files
from garnish.errors import StartError
from garnish.hub import is_hub_place, local_folder
from garnish.places import path_problem
from garnish.service_file import WHEEL_URL, Function, Gateway, Infra, Node, NodePool, Tenant, Top
from garnish.sizes import parse_bytes, parse_rate, parse_seconds, parse_whole_seconds
from garnish.yaml_file import Document, FieldPath, read_yaml
from gateway.origins import check_origins
from gateway.prices import Prices
from gateway.webhook_hosts import parse_webhook_hosts
from node_agent.config import RUNNERS

OPEN_TENANT = "default"

Section = TypeVar("Section")


class ServiceFile(msgspec.Struct, frozen=True, kw_only=True):
    """The parsed serverless.yml; paths are as written, relative to the file's folder."""

    file: Path
    service: str
    base_model: str
    registry: str | None
    auth: str
    gateway: Gateway
    node: Node
    tenants: dict[str, Tenant]
    functions: dict[str, Function]
    node_pools: dict[str, NodePool]
    infra: Infra
    prices: Prices | None

    def path(self, written: str) -> Path:
        """Returns the absolute path of a path in the file.

        `~` is expanded, and a relative path is resolved against the file's folder. Raises StartError for an address.
        """
        if problem := path_problem(written):
            raise StartError(f"{self.file}: {problem}")
        return self.file.absolute().parent / Path(written).expanduser()

    def adapter_files(self, name: str) -> AdapterFiles:
        """Returns the files of a declared function's adapter; an adapter on the Hugging Face Hub is downloaded.

        Raises GarnishError with one line that says what is wrong.
        """
        written, use = self.functions[name].adapter, f"functions.{name}.adapter: {{}}"
        return adapter_files(local_folder(written, use) if is_hub_place(written) else self.path(written), use)


def load_service_file(file: Path, environment: Mapping[str, str] | None = None) -> ServiceFile:
    """Returns the parsed service file. Raises ServiceFileError for the first error.

    `environment` has the variables that the file may use, by default those of the process.
    """
    document = read_yaml(file, environment)
    if not isinstance(document.value, dict):
        raise document.error((), "expected a mapping of `service`, `base_model`, ...")
    # YAML reads a key without a value as null; it is treated as if the key were missing.
    document.value = {key: value for key, value in document.value.items() if value is not None}
    _parse_quantities(document)
    top = _section(document, (), Top)
    loaded = ServiceFile(
        file=file,
        service=top.service,
        base_model=top.base_model,
        registry=top.registry,
        auth=top.auth,
        gateway=_section(document, ("gateway",), Gateway),
        node=_section(document, ("node",), Node),
        tenants=_named_sections(document, "tenants", Tenant),
        functions=_named_sections(document, "functions", Function),
        node_pools=_named_sections(document, "node_pools", NodePool),
        infra=_section(document, ("infra",), Infra),
        prices=top.prices,
    )
    _refuse_unbuilt(document)
    _check_addresses(document, loaded)
    _check_together(document, loaded)
    return loaded


QUANTITIES: dict[str, Callable[[object], float | None]] = {
    "node.adapter_memory": parse_bytes,
    "node.host_memory": parse_bytes,
    "node.kv_memory": lambda value: None if value == "auto" else parse_bytes(value),
    "node.disk_cache.bytes": parse_bytes,
    "node.simulate.link": parse_rate,
    "node.simulate.store": parse_rate,
    "functions.*.timeout": parse_seconds,
    "functions.*.max_age": parse_seconds,
    "functions.*.idle_ttl": parse_seconds,
    "functions.*.warm.*.for": parse_whole_seconds,
    "tenants.*.limits.bytes": parse_bytes,
    "tenants.*.limits.stored_call_bytes": parse_bytes,
    "tenants.*.limits.text_bytes_per_second": parse_bytes,
    "tenants.*.file_bytes": parse_bytes,
    "gateway.hold": parse_seconds,
    "node_pools.*.scale_to_zero_after": parse_seconds,
    "node_pools.*.scaling.queue_wait": parse_seconds,
    "node_pools.*.scaling.up": parse_seconds,
    "node_pools.*.scaling.down": parse_seconds,
}


def _policies() -> tuple[object, ...]:
    from gateway.scheduling.policy import POLICIES  # imports numpy, which takes 0.2 s and is needed only for this key

    return tuple(POLICIES)


def _predictors() -> tuple[object, ...]:
    from gateway.residency.remote_trainer import CHOICES  # imports numpy, too

    return CHOICES


BUILT: dict[str, tuple[object, ...] | Callable[[], tuple[object, ...]]] = {
    "gateway.policy": _policies,
    "gateway.predictor": _predictors,
    "node.runner": tuple(RUNNERS),
    "node.tensor_parallel": (1,),
}
"""Allowed values of settings in this version of Garnish, by the setting's dotted path; an empty tuple if the feature is
not implemented."""


def built(path: str) -> tuple[object, ...]:
    """Returns the values that the key `path` of BUILT may have."""
    values = BUILT[path]
    return values() if callable(values) else values


def _parse_quantities(document: Document) -> None:
    for pattern, parse in QUANTITIES.items():
        for path, holder in _matches(document.value, pattern):
            try:
                holder[path[-1]] = parse(holder[path[-1]])
            except ValueError as error:
                raise document.error(path, str(error)) from None


def _refuse_unbuilt(document: Document) -> None:
    for pattern in BUILT:
        for path, holder in _matches(document.value, pattern):
            value = holder[path[-1]]
            if value is None or value in (served := built(pattern)):
                continue
            shown = ", ".join(str(item) for item in served)
            hint = f"only {shown} is served" if served else "leave the key out"
            raise document.error(path, f"{value!r} is not built yet in this version: {hint}")


def _check_addresses(document: Document, loaded: ServiceFile) -> None:
    for name, tenant in loaded.tenants.items():
        try:
            parse_webhook_hosts(tenant.webhook_hosts or ())
        except ValueError as error:
            raise document.error(("tenants", name, "webhook_hosts"), str(error)) from None
    for source in loaded.gateway.allowed_sources or ():
        try:
            check_source(source)
        except InvalidRequest as error:
            raise document.error(("gateway", "allowed_sources"), str(error)) from None
    try:
        check_origins(loaded.gateway.cors_origins or (), has_keys=loaded.auth == "keys")
    except ValueError as error:
        raise document.error(("gateway", "cors_origins"), str(error)) from None
    if loaded.gateway.redis is not None and (problem := url_problem(loaded.gateway.redis)):
        raise document.error(("gateway", "redis"), problem)
    if "@" in (loaded.infra.gateway_url or ""):
        raise document.error(
            ("infra", "gateway_url"),
            "expected no user and password: Terraform keeps the address in its plans and state",
        )
    if loaded.infra.aws is not None and not re.fullmatch(WHEEL_URL, loaded.infra.aws.package):
        raise document.error(
            ("infra", "aws", "package"),
            f"expected the s3:// address of a wheel, found {loaded.infra.aws.package!r}: the name garnish on PyPI is "
            "not this project's. Run `make wheel`, copy dist/*.whl to a bucket and name it here",
        )
    if loaded.registry is not None:
        try:
            store_kind(loaded.registry).check(loaded.registry)
        except InvalidRequest as error:
            raise document.error(("registry",), str(error)) from None
    state = loaded.infra.state
    if state is not None and not state.startswith("s3://") and (problem := path_problem(state)):
        raise document.error(("infra", "state"), f"{problem} or s3://bucket/prefix")
    for name, function in loaded.functions.items():
        if not is_hub_place(function.adapter) and (problem := path_problem(function.adapter)):
            raise document.error(("functions", name, "adapter"), f"{problem} or hf:org/name")


def _matches(value: Any, pattern: str, path: FieldPath = ()) -> Iterator[tuple[FieldPath, dict[str, Any]]]:
    """Yields the paths that match a dotted pattern, each with the mapping that contains its last key.

    `*` in the pattern matches any key or list item.
    """
    head, _, rest = pattern.partition(".")
    if isinstance(value, list) and head == "*":
        for number, item in enumerate(value):
            yield from _matches(item, rest, (*path, str(number)))
    if not isinstance(value, dict):
        return
    for key in list(value) if head == "*" else [head] if head in value else []:
        if rest:
            yield from _matches(value[key], rest, (*path, key))
        else:
            yield (*path, key), value


def _named_sections(document: Document, section: str, kind: type[Section]) -> dict[str, Section]:
    entries = document.value.get(section, {})
    for name in entries:
        if not is_name(name):
            raise document.error(
                (section, name), "expected a name of 1 to 64 of a-z, 0-9, '.', '_' and '-' that starts and ends with a "
                "letter or digit",
            )  # fmt: skip
    return {name: _section(document, (section, name), kind) for name in entries}


def _section(document: Document, path: FieldPath, kind: type[Section]) -> Section:
    value: Any = document.value
    for key in path:
        value = value.get(key)
        value = {} if value is None else value
    if not isinstance(value, dict):
        raise document.error(path, f"expected a mapping, found {value!r}")
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        raise _explained(document, path, kind, str(error)) from None


def _explained(document: Document, path: FieldPath, kind: type[Any], message: str) -> Exception:
    """Returns msgspec's message as an error of the file, with the field and what was expected in it."""
    problem, _, where = message.partition(" - at `$")
    inner = path + tuple(part for part in re.split(r"[.\[\]]+", where.rstrip("`")) if part)
    fields: tuple[str, ...] = getattr(_type_at(kind, inner[len(path) :]), "__struct_encode_fields__", ())
    if match := re.match(r"Object contains unknown field `(.*)`$", problem):
        near = nearest(match[1], fields)
        hint = f"did you mean `{near[0]}`? " if near else ""
        return document.error((*inner, match[1]), f"unknown key; {hint}expected one of {', '.join(fields)}")
    if match := re.match(r"Object missing required field `(.*)`$", problem):
        return document.error((*inner, match[1]), "the key is missing")
    if problem.startswith("Invalid enum value"):
        allowed = getattr(_type_at(kind, inner[len(path) :]), "__args__", ())
        problem += f", expected one of {', '.join(map(str, allowed))}" if allowed else ""
    return document.error(inner, problem[:1].lower() + problem[1:])


def _type_at(kind: Any, path: FieldPath) -> Any:
    for name in path:
        # The type of a section that may be missing, or be a word, is a union that contains one struct.
        section = next((part for part in (kind, *get_args(kind)) if hasattr(part, "__struct_fields__")), None)
        if section is None:
            return None
        kind = next((field.type for field in msgspec.structs.fields(section) if field.encode_name == name), None)
    return next((part for part in (kind, *get_args(kind)) if hasattr(part, "__struct_fields__")), kind)


def _check_together(document: Document, loaded: ServiceFile) -> None:
    """Raises ServiceFileError for fields that are valid individually but not in combination."""
    if loaded.gateway.workers > 1 and loaded.gateway.redis is None:
        raise document.error(
            ("gateway", "workers"), "more than one worker needs gateway.redis, which holds what they share"
        )
    _check_devices(document, loaded.node)
    for name, pool in loaded.node_pools.items():
        if not pool.min <= pool.desired <= pool.max:
            raise document.error(("node_pools", name), "expected min <= desired <= max")
        if pool.scale_to_zero_after is not None and pool.min > 0:
            raise document.error(
                ("node_pools", name, "scale_to_zero_after"), f"min is {pool.min}: expected 0, or no such key"
            )
    tenants = loaded.tenants or {OPEN_TENANT: Tenant()}
    for name, function in loaded.functions.items():
        path: FieldPath = ("functions", name)
        if function.tenant is None and len(tenants) > 1:
            raise document.error((*path, "tenant"), f"the key is missing; expected one of {', '.join(tenants)}")
        if function.tenant is not None and function.tenant not in tenants:
            raise document.error((*path, "tenant"), f"unknown tenant; expected one of {', '.join(tenants)}")
        if function.alias is not None and not is_alias(function.alias):
            raise document.error((*path, "alias"), "expected a name that is not all digits")
        try:
            parse_policy(function.policy(), Policy(), within="")
        except InvalidRequest as error:
            field = (error.param or "").partition("[")[0]
            raise document.error((*path, field), str(error)) from None


def _check_devices(document: Document, node: Node) -> None:
    if node.devices == "all":
        return
    if node.device == "cpu":
        raise document.error(("node", "devices"), "these are GPUs, but device is cpu: remove the key")
    if len(set(node.devices)) < len(node.devices):
        raise document.error(("node", "devices"), "a GPU is named twice: it takes one node")


def tenant_names(loaded: ServiceFile) -> tuple[str, ...]:
    """Returns the names of the declared tenants, or `default` if none is declared.

    The first one is the default tenant.
    """
    return tuple(loaded.tenants) or (OPEN_TENANT,)


def tenant_of(loaded: ServiceFile, function: Function) -> str:
    return function.tenant or tenant_names(loaded)[0]
