"""Standing parts of functions' policies, which apply while no call runs: provisioned copies, idle limits, reserved
concurrency and `prefetch`.

Copies, idle limits and `prefetch` of all functions are in one object, so that the leader need not read all records.
Reserved concurrency is in the tenant's record, which every call reads; one place is one concurrent generation. Both are
claimed before a policy is committed, so that the policy is refused if the sum does not fit. Afterwards both are updated
from the committed record.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta

from adapters.epoch import update_marked
from adapters.errors import Conflict, CorruptRecord, StoreUnavailable
from adapters.functions import FunctionRecord, Policy, Provisioned, VersionEntry
from adapters.records import find_record, update_record
from adapters.store import ObjectStore
from adapters.tenants import MAX_RESERVED, Tenant, tenant_key

STANDING_KEY = "standing.json"
MAX_STANDING = 5000
MAX_TENANT_STANDING = 1000
MAX_DIGESTS = 16
"""Maximum number of versions of one function, the newest that an alias names, to which an idle limit applies."""

log = logging.getLogger("gateway")


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """Standing part of one function's policy."""

    since: float
    device: int = 0
    host: int = 0
    """Number of provisioned copies in host memory; `device` is the number on devices."""
    bytes: int = 0
    """Bytes of one copy of all versions that `latest` names."""
    elements: int = 0
    """Number of elements of that copy."""
    idle_ttl: float | None = None
    digests: tuple[str, ...] = ()
    reserved: int = 0
    """Number of concurrent generations reserved for the function."""
    prefetch: bool = True
    """True: forecasts may load the function's adapters on nodes."""

    def matches(self, policy: Policy) -> bool:
        """Returns whether the entry has the values of the policy's standing part."""
        return _entry_from_policy(policy) == msgspec.structs.replace(self, since=0.0, bytes=0, elements=0, digests=())


class Standing(msgspec.Struct, frozen=True):
    """Content of standing.json."""

    functions: dict[str, Entry] = {}
    """Entries by `tenant/function`."""


class Memory(msgspec.Struct, frozen=True):
    """Limits of provisioned copies, over all nodes that serve the base. A limit that is None is unknown, and not
    checked."""

    nodes: int | None = None
    device: float | None = None
    """Device memory for provisioned copies, in bytes; `host` is the same for host memory."""
    host: float | None = None
    copies: int | None = None
    """Maximum number of copies of all functions, over both tiers."""
    tenant_share: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Fraction of these bytes that one tenant may use."""
    itemsize: int = 0
    """Bytes per adapter element on the nodes. 0: unknown; copies then count with their size in the registry."""

    def taken_by(self, entry: Entry) -> int:
        """Returns the size of one copy of the function on a node, in bytes."""
        return entry.elements * self.itemsize or entry.bytes


def update_function(
    store: ObjectStore,
    tenant: str,
    name: str,
    change: Callable[[FunctionRecord | None], FunctionRecord],
    memory: Memory | None = None,
) -> FunctionRecord:
    """Changes function.json like `update_marked`, and returns the new record.

    If the function's policy has a standing part, before or after the change, this part is first entered in
    standing.json and the tenant's record, so that it counts against the limits. At the end both are updated from the
    stored record.

    Raises what `change` and `update_marked` raise, and Conflict when the sum over the functions would exceed a limit.
    `memory` is checked only when the policy requests more copies than before.
    """
    is_standing = False

    def with_claim(record: FunctionRecord | None) -> FunctionRecord:
        nonlocal is_standing
        changed = change(record)
        before = Policy() if record is None else record.policy
        if changed is not record and (stands_in(before) or stands_in(changed.policy)):
            is_standing = True
            _claim(store, tenant, before, changed, memory or Memory())
        return changed

    key = function_key(tenant, name)
    try:
        return update_marked(store, key, FunctionRecord, with_claim)
    finally:
        if is_standing:
            settle(store, tenant, name)


def settle(store: ObjectStore, tenant: str, name: str) -> None:
    """Updates standing.json and the tenant's record from the function's record. A failed write is logged; the leader,
    or the function's next change, repeats it."""
    key, owner = function_key(tenant, name), f"{tenant}/{name}"

    def standing(current: Standing | None) -> Standing:
        current = current or Standing()
        # Read inside the update: of two concurrent ones, the later sees the newer record.
        record = find_record(store, key, FunctionRecord)
        entry = None if record is None else _entry(record, current.functions.get(owner), store.now())
        if entry == current.functions.get(owner):
            return current
        rest = {each: value for each, value in current.functions.items() if each != owner}
        return Standing(rest if entry is None else {**rest, owner: entry})

    def reserved(current: Tenant | None) -> Tenant:
        current = current or Tenant(tenant)
        record = find_record(store, key, FunctionRecord)
        places = 0 if record is None or record.deleted else record.policy.reserved_concurrency or 0
        return _with_reserved(current, name, places)

    try:
        update_record(store, STANDING_KEY, Standing, standing)
        if find_record(store, tenant_key(tenant), Tenant) is not None:
            update_marked(store, tenant_key(tenant), Tenant, reserved)
    except (StoreUnavailable, CorruptRecord) as error:
        log.warning("the standing part of a policy is not recorded yet", extra={"function": owner, "why": str(error)})


def read_standing(store: ObjectStore) -> Standing:
    """Returns the standing parts of all functions' policies. Raises StoreUnavailable or CorruptRecord."""
    return find_record(store, STANDING_KEY, Standing) or Standing()


def function_key(tenant: str, name: str) -> str:
    """Returns the object key of a function's FunctionRecord."""
    return f"tenants/{tenant}/functions/{name}/function.json"


def live_versions(record: FunctionRecord) -> list[VersionEntry]:
    """Returns the versions that `latest` names."""
    latest = record.aliases.get("latest")
    weights = {} if latest is None else latest.weights
    return [entry for entry in record.versions if str(entry.version) in weights]


def stands_in(policy: Policy) -> bool:
    """Returns whether the policy has a standing part."""
    standing = (policy.provisioned, policy.idle_ttl, policy.reserved_concurrency)
    return policy.prefetch == "off" or any(field is not None for field in standing)


# --- inside


def _claim(store: ObjectStore, tenant: str, before: Policy, changed: FunctionRecord, memory: Memory) -> None:
    """Claims the reserved concurrency and the standing part of the changed policy. Raises Conflict, which states the
    sum that does not fit."""
    policy, owner = changed.policy, f"{tenant}/{changed.name}"
    places = policy.reserved_concurrency or 0
    if places > (before.reserved_concurrency or 0) and find_record(store, tenant_key(tenant), Tenant) is not None:
        update_marked(
            store, tenant_key(tenant), Tenant, lambda current: _claimed(current, tenant, changed.name, places)
        )
    if not stands_in(policy):
        return

    def standing(current: Standing | None) -> Standing:
        current = current or Standing()
        entry = _entry(changed, current.functions.get(owner), store.now())
        assert entry is not None  # the policy has a standing part
        claimed = Standing({**current.functions, owner: entry})
        of_tenant = sum(each.startswith(f"{tenant}/") for each in claimed.functions)
        if len(claimed.functions) > MAX_STANDING or of_tenant > MAX_TENANT_STANDING:
            raise Conflict(f"at most {MAX_TENANT_STANDING} functions of a tenant, and {MAX_STANDING} in all, may have "
                           "provisioned copies, an idle_ttl, reserved_concurrency or prefetch: off")  # fmt: skip
        if _rises(before, policy):
            _check_room(claimed, owner, memory)
        return claimed if claimed != current else current

    update_record(store, STANDING_KEY, Standing, standing)


def _rises(before: Policy, policy: Policy) -> bool:
    """Returns whether the policy requests more copies than before, in either tier."""
    old, new = before.provisioned or Provisioned(), policy.provisioned or Provisioned()
    return new.device > old.device or new.host > old.host


def _entry(record: FunctionRecord, current: Entry | None, now: float) -> Entry | None:
    """Returns the function's entry for standing.json; None: no entry."""
    policy = record.policy
    if record.deleted or not stands_in(policy):
        return None
    aliased = {version for alias in record.aliases.values() for version in alias.weights}
    digests = [entry.digest for entry in record.versions if str(entry.version) in aliased]
    live = live_versions(record)
    return msgspec.structs.replace(
        _entry_from_policy(policy),
        since=now if current is None else current.since,
        bytes=sum(entry.bytes for entry in live),
        elements=sum(entry.bytes // entry.itemsize for entry in live),
        digests=tuple(digests[-MAX_DIGESTS:]) if policy.idle_ttl is not None else (),
    )


def _entry_from_policy(policy: Policy) -> Entry:
    """Returns an entry with the fields that depend only on the policy."""
    copies = policy.provisioned or Provisioned()
    return Entry(
        since=0.0,
        device=copies.device,
        host=copies.host,
        idle_ttl=policy.idle_ttl,
        reserved=policy.reserved_concurrency or 0,
        prefetch=policy.prefetch != "off",
    )


def _check_room(standing: Standing, owner: str, memory: Memory) -> None:
    """Raises Conflict if the provisioned copies of `owner` and of the other functions do not fit in `memory`."""
    entry, tenant = standing.functions[owner], owner.partition("/")[0]
    copies = entry.device + entry.host
    if memory.nodes is not None and copies > memory.nodes:
        raise Conflict(
            f"provisioned: {copies} copies ({entry.device} device, {entry.host} host) need as many nodes; "
            f"{memory.nodes} serve this model"
        )
    all_copies = sum(each.device + each.host for each in standing.functions.values())
    if memory.copies is not None and all_copies > memory.copies:
        raise Conflict(
            f"provisioned: {all_copies} copies in all, and the nodes that serve this model keep {memory.copies}"
        )
    for tier, room in (("device", memory.device), ("host", memory.host)):
        if room is None or not getattr(entry, tier):
            continue
        sums = {key: getattr(each, tier) * memory.taken_by(each) for key, each in standing.functions.items()}
        of_tenant = sum(size for key, size in sums.items() if key.startswith(f"{tenant}/"))
        for sharer, needed, allowed in (("all tenants", sum(sums.values()), room),
                                        ("the tenant", of_tenant, room * memory.tenant_share)):  # fmt: skip
            if needed > allowed:
                size, count = memory.taken_by(entry), getattr(entry, tier)
                raise Conflict(
                    f"provisioned: {size} bytes x {count} {tier} copies make {needed} bytes for "
                    f"the functions of {sharer}, and {int(allowed)} of the nodes' {tier} memory may be provisioned for "
                    "them; take other copies back, or add nodes"
                )


def _claimed(current: Tenant | None, tenant: str, name: str, places: int) -> Tenant:
    """Returns the tenant's record with `places` concurrent generations reserved for the function. Raises Conflict when
    the sum exceeds the tenant's limit, or when more than MAX_RESERVED functions have a reservation."""
    current = current or Tenant(tenant)
    changed = _with_reserved(current, name, places)
    limit, total = current.limits.concurrent, sum(changed.reserved.values())
    if limit is not None and total > limit:
        raise Conflict(f"reserved_concurrency: {total} in total, but the tenant may have {limit} generations at once")
    if len(changed.reserved) > MAX_RESERVED:
        raise Conflict(f"reserved_concurrency: {MAX_RESERVED} functions of the tenant have reservations already")
    return changed


def _with_reserved(record: Tenant, name: str, places: int) -> Tenant:
    """Returns the tenant's record with `places` concurrent generations reserved for the function. Returns the same
    object if nothing changes, or the tenant is deleted."""
    if record.deleted or record.reserved.get(name, 0) == places:
        return record
    rest = {function: count for function, count in record.reserved.items() if function != name}
    return msgspec.structs.replace(record, reserved={**rest, name: places} if places else rest)
