"""Records that the registry keeps of a function: function.json and the manifests of its versions."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from adapters.aliases import Alias, history_room, moved
from adapters.destinations import Destination, check_destination
from adapters.errors import Conflict, InvalidRequest, NotFound
from adapters.slo import SloClass
from adapters.warm_windows import MAX_COPIES, MAX_WINDOWS, CronProblem, WarmWindow, window_state

MAX_VERSIONS = 10_000
MAX_ALIASES = 1000
"""Function.json is read for each call that is not cached, so it may not grow without end."""

REMOVED_SECONDS = 48 * 3600.0
"""Seconds for which a removal is remembered: longer than any call waits for a removed version."""

MAX_TEMPLATE = 1 << 15
"""Characters of a chat template; the longest of known models have half of it."""
StopText = Annotated[str, Meta(min_length=1, max_length=256)]


class Defaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Values that a call of the function has when it does not state them itself. None: the service's default."""

    max_tokens: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=1_000_000)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None = None
    stop: Annotated[list[StopText], Meta(max_length=16)] | StopText | None = None
    ignore_eos: bool | None = None
    chat_template: Annotated[str, Meta(min_length=1, max_length=MAX_TEMPLATE)] | None = None
    """Makes a text of `messages`, in Jinja, as tokenizer_config.json has it. None: the base model's."""


class Provisioned(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Copies of the adapter that are kept on nodes, each on another node."""

    device: Annotated[int, Meta(ge=0, le=MAX_COPIES)] = 0
    host: Annotated[int, Meta(ge=0, le=MAX_COPIES)] = 0
    """Copies in host memory, on further nodes."""


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Rules by which a function is served: only what the gateway enforces, so nothing is accepted and then ignored."""

    timeout: Annotated[float, Meta(gt=0, le=3600)] | None = None
    """Seconds that a call may take when it does not state less."""
    defaults: Defaults = Defaults()
    max_concurrency: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    """Generations of the function that run at once, by all gateway workers together; more are answered 429."""
    reserved_concurrency: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    """Generations for which calls of the tenant's other functions leave room."""
    provisioned: Provisioned | None = None
    """Copies that stay on nodes while nobody calls."""
    idle_ttl: Annotated[float, Meta(gt=0, le=30 * 86400)] | None = None
    """Seconds without a call after which the adapter leaves a node's device, and after as many more its host memory."""
    warm: Annotated[list[WarmWindow], Meta(max_length=MAX_WINDOWS)] = []
    """Times at which its adapter is wanted on nodes before calls come."""
    prefetch: Literal["auto", "off"] | None = None
    """`off`: no forecast of its calls brings its adapter to a node. What is provisioned, ordered or scheduled comes."""
    slo_class: SloClass | None = None
    """SLO class of its calls; None: the tenant's. A higher one than the tenant's counts as the tenant's."""
    retries: Annotated[int, Meta(ge=0, le=10)] | None = None
    """Further attempts of an asynchronous call."""
    max_age: Annotated[float, Meta(ge=1, le=7 * 86400)] | None = None
    """Seconds from the acceptance of an asynchronous call, after which no attempt begins."""
    on_success: Destination | None = None
    """Destination for asynchronous calls that state none themselves; so is `on_failure`."""
    on_failure: Destination | None = None


SUPPORTED_POLICY = Policy.__struct_fields__
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of an element, by the dtypes that adapters may have."""


class VersionEntry(msgspec.Struct, frozen=True):
    """A version as function.json lists it: what calls need, so that they read one object."""

    version: int
    digest: str
    base: str
    """Fingerprint of the base that it was deployed for."""
    ranks: tuple[int, ...]
    targets: tuple[str, ...]
    bytes: int
    """Bytes of its tensors as served."""
    created: float
    itemsize: int = 0
    """Bytes of an element, of those. 0: listed by an earlier release, until it is deployed again."""


class FunctionRecord(msgspec.Struct, frozen=True):
    """The content of function.json. A deleted function stays as a tombstone, so that its version numbers are never used
    again."""

    name: str
    created: float
    generation: int = 1
    """Rises by one with each change of the record."""
    next_version: int = 1
    deleted: bool = False
    removed: dict[str, float] = {}
    """Versions that were taken off the list a short while ago, with the Unix time by the store's clock: calls of them
    may still run, and read their artifacts."""
    policy: Policy = Policy()
    versions: tuple[VersionEntry, ...] = ()
    """Ascending by number."""
    aliases: dict[str, Alias] = {}

    def numbers(self) -> frozenset[str]:
        """Returns the numbers of the function's versions, as text: so aliases name them."""
        return frozenset(str(entry.version) for entry in self.versions)


class BrokenFunction(msgspec.Struct, frozen=True):
    """A function whose function.json can't be read, as a list has it."""

    name: str
    problem: str


class Manifest(msgspec.Struct, frozen=True):
    """The content of versions/<n>.json: everything about one version, written once."""

    function: str
    version: int
    digest: str
    base: str
    base_id: str
    config_sha256: str
    """Blob of adapter_config.json."""
    weights_sha256: str
    """Blob of adapter_model.safetensors."""
    dtype: str
    ranks: tuple[int, ...]
    targets: tuple[str, ...]
    bytes: int
    warnings: tuple[str, ...]
    created: float
    source: str | None = None
    """Origin of the files, if they did not come with the request."""


def parse_policy(policy: dict[str, Any], current: Policy, within: str = "policy.") -> Policy:
    """Returns `current` with the fields that `policy` states; null sets a field back to its default. Raises
    InvalidRequest naming the field.

    `within` is put before the field's name in errors: the path at which the caller stated it.
    """
    for field in policy:
        if field not in SUPPORTED_POLICY:
            served = ", ".join(SUPPORTED_POLICY)
            raise InvalidRequest(f"{within}{field[:100]}", f"this policy field is not served; served are: {served}")
    try:
        stated = msgspec.convert({field: value for field, value in policy.items() if value is not None}, Policy)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$.")
        field = f"{within}{path.rstrip('`')}"
        raise InvalidRequest(field, f"{field}: {reason}") from None
    for index, window in enumerate(stated.warm):
        try:
            window_state(window, time.time())
        except CronProblem as problem:
            field = f"{within}warm[{index}].cron"
            raise InvalidRequest(field, f"{field}: {problem}") from None
    check_destination(stated.on_success, f"{within}on_success")
    check_destination(stated.on_failure, f"{within}on_failure")
    changed = msgspec.structs.replace(current, **{field: getattr(stated, field) for field in policy})
    reserved, maximum = changed.reserved_concurrency, changed.max_concurrency
    if reserved is not None and maximum is not None and reserved > maximum:
        field = f"{within}reserved_concurrency"
        raise InvalidRequest(field, f"{field}: {reserved} is more than max_concurrency, {maximum}, lets run at once")
    return changed


def with_version(record: FunctionRecord, entry: VersionEntry, alias: str, now: float) -> FunctionRecord:
    """Returns the record with `entry` listed and `alias` moved to it, one generation later.

    Another alias than `latest` leaves `latest` where it is, unless the function has none yet.
    Raises Conflict at MAX_VERSIONS or MAX_ALIASES.
    """
    older = [each for each in record.versions if each.version != entry.version]
    if len(older) >= MAX_VERSIONS:
        raise Conflict(f"function {record.name} has {MAX_VERSIONS} versions already")
    listed = msgspec.structs.replace(
        record,
        next_version=max(record.next_version, entry.version + 1),
        deleted=False,
        versions=tuple(sorted([*older, entry], key=lambda each: each.version)),
    )
    weights = {str(entry.version): 1.0}
    aliases = {alias: _moved(listed, alias, weights, now)}
    if "latest" not in {**listed.aliases, **aliases}:
        aliases["latest"] = moved(None, weights, now)
    return with_aliases(listed, aliases)


def with_alias(record: FunctionRecord, alias: str, weights: dict[str, float], now: float) -> FunctionRecord:
    """Returns the record with `alias` moved; the same object if it points there already.

    Raises NotFound for a version that the record does not list, Conflict at MAX_ALIASES.
    """
    for version in weights:
        if version not in record.numbers():
            raise NotFound(f"function {record.name} has no version {version[:100]}")
    changed = _moved(record, alias, weights, now)
    return record if changed is record.aliases.get(alias) else with_aliases(record, {alias: changed})


def with_aliases(record: FunctionRecord, changed: dict[str, Alias]) -> FunctionRecord:
    """Returns the record with `changed` among its aliases, one generation later. Raises Conflict where that makes more
    than MAX_ALIASES."""
    aliases = {**record.aliases, **changed}
    if len(aliases) > MAX_ALIASES:
        raise Conflict(f"function {record.name} has {MAX_ALIASES} aliases already")
    return msgspec.structs.replace(record, generation=record.generation + 1, aliases=aliases)


def without_version(record: FunctionRecord, version: int, now: float) -> FunctionRecord:
    """Returns the record without that version, one generation later. Raises NotFound, Conflict while an alias names the
    version."""
    if str(version) not in record.numbers():
        raise NotFound(f"function {record.name} has no version {version}")
    naming = sorted(name for name, alias in record.aliases.items() if str(version) in alias.weights)
    if naming:
        more = f" and {len(naming) - 3} more" if len(naming) > 3 else ""
        raise Conflict(f"version {version} is in use by the alias {', '.join(naming[:3])}{more}; move it first")
    remaining = tuple(entry for entry in record.versions if entry.version != version)
    removed = _removed(record, [str(version)], now)
    return msgspec.structs.replace(record, generation=record.generation + 1, versions=remaining, removed=removed)


def tombstoned(record: FunctionRecord, now: float) -> FunctionRecord:
    """Returns the tombstone of the record: what stays of a deleted function."""
    return FunctionRecord(
        name=record.name,
        created=record.created,
        generation=record.generation + 1,
        next_version=record.next_version,
        deleted=True,
        removed=_removed(record, [str(entry.version) for entry in record.versions], now),
    )


def _removed(record: FunctionRecord, versions: Iterable[str], now: float) -> dict[str, float]:
    """Returns the record's removals (version -> Unix time) with `versions` added at `now`. Removals that are
    REMOVED_SECONDS old are left out, since no call can want those versions any more; at most the last MAX_VERSIONS are
    kept."""
    recent = {version: when for version, when in record.removed.items() if now - when < REMOVED_SECONDS}
    return dict(list((recent | dict.fromkeys(versions, now)).items())[-MAX_VERSIONS:])


def _moved(record: FunctionRecord, alias: str, weights: dict[str, float], now: float) -> Alias:
    return moved(record.aliases.get(alias), weights, now, history_room(len(record.aliases)))
