"""Records of a function in the registry: function.json and the manifests of its versions."""

from __future__ import annotations

import hashlib
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
"""Maximum number of aliases of a function. Every uncached call reads function.json, so its size must be bounded."""

REMOVED_SECONDS = 48 * 3600.0
"""Seconds for which a removed version is remembered. No call waits for a version that long."""

MAX_TEMPLATE = 1 << 15
"""Maximum length of a chat template in characters, twice that of the longest known model's."""
TEMPLATE_KEY_LETTERS = 16
MAX_OWN_TEMPLATES = 8
"""Maximum number of different chat templates of a function's versions. Every uncached call reads function.json."""
MAX_TEMPERATURE = 1e6
"""Maximum temperature of a call, at which all tokens are equally likely. vLLM has no maximum."""
StopText = Annotated[str, Meta(min_length=1, max_length=256)]
TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Bias = Annotated[float, Meta(ge=-100, le=100)]


class CallDefaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Parameters that calls may state, and for which a function may have defaults. None: the service's default."""

    max_tokens: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=1_000_000)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None = None
    stop: Annotated[list[StopText], Meta(max_length=16)] | StopText | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=128)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=10_000_000)] | None = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=1024)] | None = None
    bad_words: Annotated[list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=128)] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=10_000_000)] | None = None
    """Number of the prompt's last tokens to keep; -1 keeps as many as leave room for `max_tokens`."""


class Defaults(CallDefaults, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Defaults of a function: parameters of its calls, and the forms of its conversations and answers."""

    chat_template: Annotated[str, Meta(min_length=1, max_length=MAX_TEMPLATE)] | None = None
    """Jinja chat template, as in tokenizer_config.json; None: the base model's."""
    tool_parser: Literal["hermes", "llama3_json"] | None = None
    """Form of tool calls in answers; None: the one that the chat template shows."""
    reasoning_parser: Literal["think"] | None = None
    """Form of reasoning in answers, which chats then return apart (`reasoning_content`); None: it stays in the text."""


class OwnDefaults(msgspec.Struct, frozen=True):
    """Defaults of one version, from the tokenizer's files next to its adapter. The function's own have priority."""

    chat_template: str = ""
    """Chat template; empty: none that differs from the base's."""
    stop_token_ids: tuple[int, ...] = ()
    """End tokens in addition to the base's."""
    notes: tuple[str, ...] = ()
    """Lines for the caller about these defaults, and about what could not be taken over."""


class Provisioned(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Numbers of copies of the adapter that are kept loaded, each on a different node."""

    device: Annotated[int, Meta(ge=0, le=MAX_COPIES)] = 0
    host: Annotated[int, Meta(ge=0, le=MAX_COPIES)] = 0
    """Number of copies in host memory, on additional nodes."""


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Rules by which a function is served. It has only fields that the gateway enforces, so that no accepted field is
    ignored."""

    timeout: Annotated[float, Meta(gt=0, le=3600)] | None = None
    """Maximum duration of a call in seconds, unless the call states less; None: the service's default."""
    defaults: Defaults = Defaults()
    max_concurrency: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    """Maximum number of concurrent generations of the function over all gateway workers. Calls beyond it are answered
    429."""
    reserved_concurrency: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    """Number of concurrent generations for which calls of the tenant's other functions leave room."""
    provisioned: Provisioned | None = None
    """Copies that stay loaded on nodes while no calls come."""
    idle_ttl: Annotated[float, Meta(gt=0, le=30 * 86400)] | None = None
    """Seconds without a call after which the adapter is evicted from a node's device. After twice this time it is
    evicted from host memory."""
    warm: Annotated[list[WarmWindow], Meta(max_length=MAX_WINDOWS)] = []
    """Windows of time in which the adapter is loaded on nodes before calls come."""
    prefetch: Literal["auto", "off"] | None = None
    """`off`: forecasts of calls do not load the adapter on nodes. Provisioned, scheduled and ordered loads still
    happen."""
    slo_class: SloClass | None = None
    """SLO class of the function's calls; None: the tenant's. A class above the tenant's is lowered to the tenant's."""
    retries: Annotated[int, Meta(ge=0, le=10)] | None = None
    """Number of retries of an asynchronous call; None: the service's default."""
    max_age: Annotated[float, Meta(ge=1, le=7 * 86400)] | None = None
    """Seconds after the acceptance of an asynchronous call within which an attempt may start."""
    on_success: Destination | None = None
    """Default destination for the results of asynchronous calls. `on_failure` is the one for failures."""
    on_failure: Destination | None = None


SUPPORTED_POLICY = Policy.__struct_fields__
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes per element of each dtype that adapters may have."""


class VersionEntry(msgspec.Struct, frozen=True):
    """Entry of a version in function.json. It has all that calls need, so that they read only this one object."""

    version: int
    digest: str
    base: str
    """Fingerprint of the base model that the version was deployed for."""
    ranks: tuple[int, ...]
    targets: tuple[str, ...]
    bytes: int
    """Size of the tensors as served, in bytes."""
    created: float
    itemsize: int
    """Bytes per element with which `bytes` was computed."""
    config_sha256: str = ""
    """SHA-256 of adapter_config.json, which names its blob; `weights_sha256` is that of adapter_model.safetensors."""
    weights_sha256: str = ""
    artifact: bool = True
    """True: `base` has a serving artifact of the version. False: only vLLM serves that base, from the original
    files."""
    template: str = ""
    """Key of the version's own chat template in FunctionRecord.templates; empty: it has none."""
    stop_token_ids: tuple[int, ...] = ()
    """The version's own end tokens."""
    hold: str = ""
    """Id of the hold by which the deploy reserved the tenant's quota; "" if it had none (adapters.quota)."""


class FunctionRecord(msgspec.Struct, frozen=True):
    """Content of function.json. A deleted function remains as a tombstone, so that its version numbers are never
    reused."""

    name: str
    created: float
    generation: int = 1
    """Number that rises by one with each change of the record."""
    next_version: int = 1
    deleted: bool = False
    removed: dict[str, float] = {}
    """Recently removed versions, with the Unix time of removal by the store's clock. Running calls may still read their
    artifacts."""
    policy: Policy = Policy()
    versions: tuple[VersionEntry, ...] = ()
    """Listed versions, ascending by number."""
    aliases: dict[str, Alias] = {}
    templates: dict[str, str] = {}
    """Chat templates of versions, by key. Versions with the same template share one."""
    fences: int = 0
    """Number that rises when a count of the tenant's adapters shuts out a deploy that seems to have died
    (adapters.quota). It makes the record differ from what that deploy has read."""

    def numbers(self) -> frozenset[str]:
        """Returns the version numbers as text, the form in which aliases name them."""
        return frozenset(str(entry.version) for entry in self.versions)


class BrokenFunction(msgspec.Struct, frozen=True):
    """Entry of a list for a function whose function.json can't be read."""

    name: str
    problem: str


class Manifest(msgspec.Struct, frozen=True):
    """Content of versions/<n>.json: everything about one version, written once."""

    function: str
    version: int
    digest: str
    base: str
    base_id: str
    config_sha256: str
    """SHA-256 of adapter_config.json, which names its blob."""
    weights_sha256: str
    """SHA-256 of adapter_model.safetensors, which names its blob."""
    dtype: str
    ranks: tuple[int, ...]
    targets: tuple[str, ...]
    bytes: int
    warnings: tuple[str, ...]
    created: float
    source: str | None = None
    """Source address of the files, if they did not come with the request."""


def parse_policy(policy: dict[str, Any], current: Policy, within: str = "policy.") -> Policy:
    """Returns `current` with the fields of `policy` replaced. Null resets a field to its default. Raises
    InvalidRequest, which names the field.

    `within` is the path of the policy in the caller's input; it precedes the field's name in errors.
    """
    for field in policy:
        if field not in SUPPORTED_POLICY:
            served = ", ".join(SUPPORTED_POLICY)
            raise InvalidRequest(f"{within}{field[:100]}", f"this policy field is unknown; known fields: {served}")
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
        raise InvalidRequest(field, f"{field}: {reserved} is more than max_concurrency, which is {maximum}")
    return changed


def with_version(record: FunctionRecord, entry: VersionEntry, alias: str, now: float) -> FunctionRecord:
    """Returns the record with `entry` listed and `alias` pointing to it, one generation later.

    `latest` moves too if the function has no `latest` yet. Raises Conflict at MAX_VERSIONS or MAX_ALIASES.
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


def with_own_defaults(
    record: FunctionRecord, entry: VersionEntry, defaults: OwnDefaults
) -> tuple[FunctionRecord, VersionEntry]:
    """Returns the record and the entry of a version with the version's own defaults, in place of earlier ones.
    Templates that no version has any more are removed. Raises Conflict at MAX_OWN_TEMPLATES."""
    used = {each.template for each in record.versions if each.version != entry.version}
    templates = {key: text for key, text in record.templates.items() if key in used}
    key = (
        hashlib.sha256(defaults.chat_template.encode()).hexdigest()[:TEMPLATE_KEY_LETTERS]
        if defaults.chat_template
        else ""
    )
    if key:
        templates[key] = defaults.chat_template
    if len(templates) > MAX_OWN_TEMPLATES:
        raise Conflict(
            f"the versions of function {record.name} have {MAX_OWN_TEMPLATES} chat templates already: remove versions, "
            "or set defaults.chat_template and deploy without the template"
        )
    changed = msgspec.structs.replace(entry, template=key, stop_token_ids=defaults.stop_token_ids)
    return msgspec.structs.replace(record, templates=templates), changed


def policy_of(record: FunctionRecord, entry: VersionEntry) -> Policy:
    """Returns the policy for calls of a version: the function's, completed by the version's own defaults."""
    defaults, filled = record.policy.defaults, dict[str, Any]()
    if defaults.chat_template is None and entry.template in record.templates:
        filled["chat_template"] = record.templates[entry.template]
    if defaults.stop_token_ids is None and entry.stop_token_ids:
        filled["stop_token_ids"] = list(entry.stop_token_ids)
    if not filled:
        return record.policy
    return msgspec.structs.replace(record.policy, defaults=msgspec.structs.replace(defaults, **filled))


def with_alias(record: FunctionRecord, alias: str, weights: dict[str, float], now: float) -> FunctionRecord:
    """Returns the record with `alias` pointing to `weights`; the same object if it already does.

    Raises NotFound for a version that is not listed, and Conflict at MAX_ALIASES.
    """
    for version in weights:
        if version not in record.numbers():
            raise NotFound(f"function {record.name} has no version {version[:100]}")
    changed = _moved(record, alias, weights, now)
    return record if changed is record.aliases.get(alias) else with_aliases(record, {alias: changed})


def with_aliases(record: FunctionRecord, changed: dict[str, Alias]) -> FunctionRecord:
    """Returns the record with the aliases in `changed` added or replaced, one generation later. Raises Conflict above
    MAX_ALIASES."""
    aliases = {**record.aliases, **changed}
    if len(aliases) > MAX_ALIASES:
        raise Conflict(f"function {record.name} has {MAX_ALIASES} aliases already")
    return msgspec.structs.replace(record, generation=record.generation + 1, aliases=aliases)


def without_version(record: FunctionRecord, version: int, now: float) -> FunctionRecord:
    """Returns the record without that version, one generation later. Raises NotFound, or Conflict while an alias names
    the version."""
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
    """Returns the tombstone of the record, which remains of a deleted function."""
    return FunctionRecord(
        name=record.name,
        created=record.created,
        generation=record.generation + 1,
        next_version=record.next_version,
        deleted=True,
        removed=_removed(record, [str(entry.version) for entry in record.versions], now),
        fences=record.fences,
    )


def _removed(record: FunctionRecord, versions: Iterable[str], now: float) -> dict[str, float]:
    """Returns the record's removals (version -> Unix time), with `versions` added at `now`. Removals older than
    REMOVED_SECONDS are dropped, since no call can need those versions. Only the last MAX_VERSIONS are kept."""
    recent = {version: when for version, when in record.removed.items() if now - when < REMOVED_SECONDS}
    return dict(list((recent | dict.fromkeys(versions, now)).items())[-MAX_VERSIONS:])


def _moved(record: FunctionRecord, alias: str, weights: dict[str, float], now: float) -> Alias:
    return moved(record.aliases.get(alias), weights, now, history_room(len(record.aliases)))
