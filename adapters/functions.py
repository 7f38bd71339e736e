"""What the registry keeps of a function: the records of function.json and of a version's manifest."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from adapters.errors import Conflict, InvalidRequest

MAX_VERSIONS = 10_000
MAX_ALIASES = 1000
"""Function.json is read for each call that is not cached, so it may not grow without end."""
MAX_HISTORY = 100
"""Earlier targets that an alias remembers."""

_Text = Annotated[str, Meta(max_length=1000)]


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
    stop: Annotated[list[_Text], Meta(max_length=16)] | _Text | None = None
    ignore_eos: bool | None = None


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a function is served. Only what the gateway enforces is here, so nothing is accepted and then ignored."""

    timeout: Annotated[float, Meta(gt=0, le=3600)] | None = None
    """Seconds that a call may take when it does not state less."""
    defaults: Defaults = Defaults()


SUPPORTED_POLICY = Policy.__struct_fields__


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


class AliasChange(msgspec.Struct, frozen=True):
    weights: dict[str, float]
    when: float


class Alias(msgspec.Struct, frozen=True):
    """Where an alias points: version number -> share of calls; shares sum to 1."""

    weights: dict[str, float]
    generation: int
    """Rises by one with each move."""
    when: float
    history: tuple[AliasChange, ...] = ()
    """Earlier targets, the latest last."""


class FunctionRecord(msgspec.Struct, frozen=True):
    """function.json. A deleted function stays as a tombstone, so that its version numbers are never used again."""

    name: str
    created: float
    generation: int = 1
    """Rises by one with each change of the record."""
    next_version: int = 1
    deleted: bool = False
    policy: Policy = Policy()
    versions: tuple[VersionEntry, ...] = ()
    """Ascending by number."""
    aliases: dict[str, Alias] = {}


class Manifest(msgspec.Struct, frozen=True):
    """versions/<n>.json: everything about one version, written once."""

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
    """Where the files came from, if not with the request."""


def parse_policy(policy: dict[str, Any], current: Policy) -> Policy:
    """`current` with the fields that `policy` states. Raises InvalidRequest naming the field."""
    for field in policy:
        if field not in SUPPORTED_POLICY:
            served = ", ".join(SUPPORTED_POLICY)
            raise InvalidRequest(f"policy.{field[:100]}", f"this policy field is not served; served are: {served}")
    try:
        stated = msgspec.convert(policy, Policy)
    except msgspec.ValidationError as error:
        told, _, path = str(error).partition(" - at `$")
        field = f"policy{path.rstrip('`')}"
        raise InvalidRequest(field, f"{field}: {told}") from None
    return msgspec.structs.replace(current, **{field: getattr(stated, field) for field in policy})


def moved(alias: Alias | None, version: int, now: float) -> Alias:
    """The alias pointing to `version` alone; the same object if it already does."""
    weights = {str(version): 1.0}
    if alias is None:
        return Alias(weights=weights, generation=1, when=now)
    if alias.weights == weights:
        return alias
    history = (*alias.history, AliasChange(weights=alias.weights, when=alias.when))[-MAX_HISTORY:]
    return Alias(weights=weights, generation=alias.generation + 1, when=now, history=history)


def with_version(record: FunctionRecord, entry: VersionEntry, alias: str, now: float) -> FunctionRecord:
    """The record with `entry` listed and `alias` moved to it, one generation later.

    Another alias than `latest` leaves `latest` where it is, unless the function has none yet.
    Raises Conflict at MAX_VERSIONS or MAX_ALIASES.
    """
    aliases = dict(record.aliases)
    aliases[alias] = moved(aliases.get(alias), entry.version, now)
    if "latest" not in aliases:
        aliases["latest"] = moved(None, entry.version, now)
    if len(aliases) > MAX_ALIASES:
        raise Conflict(f"function {record.name} has {MAX_ALIASES} aliases already")
    others = [known for known in record.versions if known.version != entry.version]
    if len(others) >= MAX_VERSIONS:
        raise Conflict(f"function {record.name} has {MAX_VERSIONS} versions already")
    return msgspec.structs.replace(
        record,
        generation=record.generation + 1,
        next_version=max(record.next_version, entry.version + 1),
        deleted=False,
        versions=tuple(sorted([*others, entry], key=lambda known: known.version)),
        aliases=aliases,
    )
