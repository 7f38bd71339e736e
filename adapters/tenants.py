"""Tenants and their API keys. The registry stores only hashes of keys; a key is shown once, when it is created."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from adapters.epoch import update_marked
from adapters.errors import Conflict, InvalidRequest, NotFound
from adapters.keys import KeyRecord, Principal, new_key, opens, operator_key, parse_key
from adapters.names import is_name
from adapters.records import find_record
from adapters.slo import Slo, Weight
from adapters.store import ObjectStore

ADMIN_KEY = "admin.json"
MAX_KEYS = 1000
"""Maximum number of stored keys of one tenant, not counting those that starting services created. Revoked keys are kept
as long as there is room."""

MAX_START_KEYS = 50
"""Maximum number of stored keys created by starting services, for each tenant and for administrators. This many
gateways may have separate local states."""

MAX_RESERVED = 32
"""Maximum number of functions of one tenant with reserved concurrency, since each call checks the reservations of all
of them."""

MAX_WEBHOOK_HOSTS = 100
WebhookHost = Annotated[str, Meta(min_length=1, max_length=253)]
"""Host name, `*.domain`, IP address or network."""

FileBytes = Annotated[int, Meta(ge=1, le=(1 << 53) - 1)]
FILE_BYTES = 10 << 30
"""Default limit on the total size of a tenant's files, in bytes."""

Positive = Annotated[float, Meta(gt=0)]


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Limits of a tenant; None: not limited. Limits of work outside calls have defaults, so that no tenant is without
    them."""

    rps: Positive | None = None
    """Calls per second, asynchronous ones when they are submitted."""
    tokens_per_minute: Positive | None = None
    concurrent: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    """Maximum number of choices generated at once."""
    adapters: Annotated[int, Meta(ge=1, le=(1 << 53) - 1)] | None = None
    """Maximum number of versions, over all functions."""
    bytes: Annotated[int, Meta(ge=1, le=(1 << 53) - 1)] | None = None
    """Maximum total size of the versions' tensors as served, in bytes."""
    text_bytes_per_second: Positive = 512 << 10
    """Bytes per second of the bodies that /tokenize and /detokenize convert."""
    reads_per_second: Positive = 1000
    """Requests per second that show something. A list of many entries counts as 10."""
    writes_per_second: Positive = 100
    """Requests per second that change something, other than calls."""
    stored_calls: Annotated[int, Meta(ge=1, le=(1 << 53) - 1)] = 50_000
    """Maximum number of stored asynchronous calls, including those that have ended and are still kept."""
    stored_call_bytes: Annotated[int, Meta(ge=1, le=(1 << 53) - 1)] = 4 << 30
    """Maximum total size of the records of stored asynchronous calls, in bytes."""


class Hold(msgspec.Struct, frozen=True):
    """Quota held for one version by a deploy in progress, since Unix time `when`."""

    bytes: int
    when: float
    function: str
    ended: bool = False
    """True: a count is about to drop the hold, and its deploy may no longer list its version."""


class QuotaUsage(msgspec.Struct, frozen=True):
    """Used part of `limits.adapters` and `limits.bytes`, never less than the true value (see adapters.quota)."""

    since: float
    """Unix time (store's clock) at which the limits were set."""
    adapters: int = 0
    bytes: int = 0
    holds: dict[str, Hold] = {}
    counted: float | None = None
    """Unix time (store's clock) of the last count of the functions; None: not counted yet."""
    epoch: int = 0
    """Number that rises by one with each count."""
    exact: bool = False
    """False: the sums may have become too high since the last count."""


class Tenant(msgspec.Struct, frozen=True):
    """Content of tenant.json: a tenant's keys and settings."""

    id: str
    keys: tuple[KeyRecord, ...] = ()
    slo: Slo = Slo()
    limits: Limits = Limits()
    weight: Weight = 1.0
    declared: bool = False
    """True: serverless.yml declares the tenant, and the API may change only its keys."""
    webhook_hosts: Annotated[tuple[WebhookHost, ...], Meta(max_length=MAX_WEBHOOK_HOSTS)] = ()
    """Hosts to which the tenant's webhooks may be sent, in addition to those allowed for all tenants."""
    file_bytes: FileBytes = FILE_BYTES
    """Limit on the total size of the tenant's files (/v1/files), in bytes."""
    reserved: dict[str, int] = {}
    """Number of concurrent generations reserved for each function (adapters.standing)."""
    held: QuotaUsage | None = None
    """Quota in use; None if no limit needs it."""
    deleted: bool = False
    """True: a tombstone of a deleted tenant, so that a new tenant of this name starts with nothing."""
    removed: bool = False
    """True: all data of the deleted tenant is deleted too."""


class Admin(msgspec.Struct, frozen=True):
    """Content of admin.json: the keys of administrators."""

    keys: tuple[KeyRecord, ...] = ()


class Tenants:
    """Tenant records and keys in the store. Methods block, and may be called from any thread."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store

    def get(self, tenant: str) -> Tenant:
        """Returns the tenant's record. Raises NotFound, also for a deleted tenant."""
        record = self._read(tenant) if is_name(tenant) else None
        if record is None or record.deleted:
            raise unknown(tenant)
        return record

    def list(self, after: str = "", limit: int = 1000) -> Sequence[Tenant]:
        """Returns a page of the tenants, ordered as in `ObjectStore.folders`."""
        records = (self._read(name) for name in self.names(after, limit))
        return tuple(tenant for tenant in records if tenant is not None and not tenant.deleted)

    def names(self, after: str = "", limit: int = 1000) -> Sequence[str]:
        """Returns a page of tenant names in a fixed order, including deleted tenants whose objects remain."""
        return self.store.folders("tenants/", after, limit)

    def put(
        self,
        tenant: str,
        *,
        slo: Slo | None = None,
        limits: Limits | None = None,
        weight: float | None = None,
        webhook_hosts: tuple[str, ...] | None = None,
        file_bytes: int | None = None,
        declared: bool | None = None,
    ) -> Tenant:
        """Creates the tenant, or changes the settings that are not None; its keys stay. Returns the record.

        Raises InvalidRequest for a malformed name or values out of range, and Conflict while a deletion of the tenant
        is unfinished.
        """
        if not is_name(tenant):
            raise InvalidRequest("tenant", f"malformed tenant name {tenant[:100]!r}")
        settings = {
            "slo": slo, "limits": limits, "weight": weight, "webhook_hosts": webhook_hosts, "file_bytes": file_bytes,
            "declared": declared,
        }  # fmt: skip
        fields = {name: value for name, value in settings.items() if value is not None}
        return self._change(tenant, lambda record: msgspec.structs.replace(record, **fields), create=True)

    def replace(
        self,
        tenant: str,
        limits: Limits,
        slo: Slo | None = None,
        weight: float = 1.0,
        webhook_hosts: tuple[str, ...] = (),
        file_bytes: int = FILE_BYTES,
    ) -> tuple[Tenant, bool]:
        """Creates the tenant, or replaces all its settings, as an administrator may.

        Returns the tenant and whether it is new. Raises what `put` raises. Also raises Conflict for a tenant that
        serverless.yml declares, and for a lower `concurrent` than its functions have reserved.
        """
        created = False

        def change(record: Tenant | None) -> Tenant:
            nonlocal created
            created = record is None or record.deleted
            current = _live(record, tenant, create=True)
            _check_undeclared(current)
            _check_reserved(current, limits.concurrent)
            changed = msgspec.structs.replace(
                current, limits=limits, slo=slo or Slo(), weight=weight, webhook_hosts=webhook_hosts,
                file_bytes=file_bytes,
            )  # fmt: skip
            return self._checked(changed)

        return self._update(tenant, change), created

    def delete(self, tenant: str) -> None:
        """Deletes the tenant's keys and hides the tenant. Call `removed` once its functions are deleted.

        Raises NotFound, also for a tenant whose deletion is finished, and Conflict for one that serverless.yml
        declares.
        """

        def bury(record: Tenant | None) -> Tenant:
            if record is None or record.removed:
                raise unknown(tenant)
            _check_undeclared(record)
            return Tenant(id=tenant, deleted=True)

        self._update(tenant, bury)

    def removed(self, tenant: str) -> None:
        """Records that a deleted tenant has no data left, so that its name is free. Raises NotFound."""

        def end(record: Tenant | None) -> Tenant:
            if record is None or not record.deleted:
                raise unknown(tenant)
            return msgspec.structs.replace(record, removed=True)

        self._update(tenant, end)

    def add_key(self, owner: str | None, made_by: Literal["start"] | None = None) -> tuple[str, KeyRecord]:
        """Creates a key of an existing tenant, or an admin key when `owner` is None. Returns its text, which is not
        stored, and its record. Raises NotFound, or Conflict at MAX_KEYS."""
        text, key = new_key(owner, made_by)
        self._change_keys(owner, lambda keys: _added(keys, key))
        return text, key

    def revoke_key(self, owner: str | None, key_id: str) -> None:
        """Revokes a key of `owner` (None: of the administrators). Revoking it twice is no error. Raises NotFound."""
        self._change_keys(owner, lambda keys: _revoked(keys, key_id))

    def adopt_key(self, text: str) -> None:
        """Stores a key that the operator chose, unless it was revoked.

        Raises InvalidRequest when `text` is not a key, NotFound if its tenant does not exist, and Conflict at MAX_KEYS.
        """
        owner, key = operator_key(text)
        self._change_keys(owner.tenant, lambda keys: _adopted(keys, key))

    def bound_start_keys(self, names: Sequence[str], used: Sequence[str]) -> None:
        """Removes surplus keys that starting services created for these tenants and for administrators. `used` has the
        texts of keys to keep in any case.

        Surplus keys appear where the registry persists and the local state does not (containers with S3): each start
        creates new keys.
        """
        ids = {claim.key_id for text in used if (claim := parse_key(text)) is not None}

        def bounded(keys: tuple[KeyRecord, ...]) -> tuple[KeyRecord, ...]:
            return _without_surplus(keys, ids)

        for name in names:
            record = self._read(name)
            if record is not None and not record.deleted and bounded(record.keys) is not record.keys:
                self._change_keys(name, bounded)
        admin = self.admin_keys()
        if bounded(admin) is not admin:
            self._change_keys(None, bounded)

    def admin_keys(self) -> tuple[KeyRecord, ...]:
        """Returns the keys of all administrators, including revoked ones."""
        return (find_record(self.store, ADMIN_KEY, Admin) or Admin()).keys

    def verify(self, text: str) -> Principal | None:
        """Returns the owner of the key `text`; None if it is not a valid, unrevoked key."""
        claim = parse_key(text)
        if claim is None:
            return None
        if claim.tenant is None:
            keys = self.admin_keys()
        else:
            record = self._read(claim.tenant)
            keys = record.keys if record else ()
        return claim if opens(text, claim.key_id, keys) else None

    def _change_keys(self, owner: str | None, change: Callable[[tuple[KeyRecord, ...]], tuple[KeyRecord, ...]]) -> None:
        """Applies `change` to the keys of a tenant, or of the administrators when `owner` is None."""
        if owner is None:
            update_marked(self.store, ADMIN_KEY, Admin, lambda admin: Admin(change((admin or Admin()).keys)))
        else:
            self._change(owner, lambda record: msgspec.structs.replace(record, keys=change(record.keys)))

    def _read(self, tenant: str) -> Tenant | None:
        return find_record(self.store, tenant_key(tenant), Tenant)

    def _change(self, tenant: str, change: Callable[[Tenant], Tenant], create: bool = False) -> Tenant:
        return self._update(tenant, lambda record: self._checked(change(_live(record, tenant, create))))

    def _checked(self, record: Tenant) -> Tenant:
        """Returns the record after encoding and decoding it, because constraints are checked only on decoding. Adds or
        drops `held` according to the limits. Raises InvalidRequest."""
        if record.limits.adapters is None and record.limits.bytes is None:
            record = msgspec.structs.replace(record, held=None)
        elif record.held is None:
            record = msgspec.structs.replace(record, held=QuotaUsage(since=self.store.now()))
        try:
            return msgspec.json.decode(msgspec.json.encode(record), type=Tenant)
        except msgspec.ValidationError as error:
            raise InvalidRequest("tenant", f"tenant {record.id}: {error}") from None

    def _update(self, tenant: str, change: Callable[[Tenant | None], Tenant]) -> Tenant:
        if not is_name(tenant):
            raise unknown(tenant)
        return update_marked(self.store, tenant_key(tenant), Tenant, change)


def tenant_key(tenant: str) -> str:
    """Returns the object key of a tenant's record."""
    return f"tenants/{tenant}/tenant.json"


def unknown(tenant: str) -> NotFound:
    """Returns the error for a tenant that does not exist."""
    return NotFound(f"there is no tenant {tenant[:100]!r}")


def _live(record: Tenant | None, tenant: str, create: bool) -> Tenant:
    """Returns the record if the tenant exists and is not deleted. Otherwise raises NotFound without `create`. With
    `create` it returns a new record, or raises Conflict while the tenant's deletion is unfinished."""
    if record is not None and not record.deleted:
        return record
    if not create:
        raise unknown(tenant)
    if record is not None and not record.removed:
        raise Conflict(f"the deletion of tenant {tenant} is unfinished: delete it again, then create it")
    return Tenant(id=tenant)


def _check_undeclared(record: Tenant) -> None:
    if record.declared:
        raise Conflict(f"tenant {record.id} is declared in serverless.yml: change it there")


def _check_reserved(record: Tenant, concurrent: int | None) -> None:
    """Raises Conflict if `concurrent` is lower than before, and also lower than the sum of the functions'
    reservations."""
    before, total = record.limits.concurrent, sum(record.reserved.values())
    if concurrent is not None and concurrent < total and (before is None or concurrent < before):
        raise Conflict(
            f"limits.concurrent: {concurrent}, and the tenant's functions have {total} reserved in all "
            "(reserved_concurrency); take some back first"
        )


def _added(keys: tuple[KeyRecord, ...], key: KeyRecord) -> tuple[KeyRecord, ...]:
    """Returns the keys with `key` added. At the limit, the key that was revoked first is dropped. Raises Conflict when
    none is revoked.

    Keys created by starting services have a separate limit, because a service must always be able to start.
    """
    counted = [each for each in keys if each.made_by != "start"]
    if key.made_by != "start" and len(counted) >= MAX_KEYS:
        revoked = [each for each in counted if each.revoked is not None]
        if not revoked:
            raise Conflict(f"there are {MAX_KEYS} keys already; revoke some first")
        first = min(revoked, key=lambda each: each.revoked or 0.0)
        keys = tuple(each for each in keys if each is not first)
    return (*keys, key)


def _without_surplus(keys: tuple[KeyRecord, ...], used: Collection[str]) -> tuple[KeyRecord, ...]:
    """Returns the keys without surplus ones that starting services created; the same object if there are none. The
    first such key stays, since it is the one that was most likely given to others. The newest ones, and those whose ids
    are in `used`, stay too."""
    by_age = sorted((key for key in keys if key.made_by == "start"), key=lambda key: key.created)
    surplus = {key.key_id for key in by_age[1 : 1 - MAX_START_KEYS]} - set(used)
    return tuple(key for key in keys if key.key_id not in surplus) if surplus else keys


def _adopted(keys: tuple[KeyRecord, ...], key: KeyRecord) -> tuple[KeyRecord, ...]:
    """Returns the keys with the operator's key added. A key that a starting service created becomes the operator's. An
    existing key with the same id stays unchanged if its text differs or it is revoked. Raises Conflict at MAX_KEYS."""
    existing = next((existing for existing in keys if existing.key_id == key.key_id), None)
    if existing is None:
        return _added(keys, key)
    if existing.sha256 != key.sha256 or existing.revoked is not None:
        return keys
    mine = msgspec.structs.replace(existing, made_by="operator")
    return tuple(mine if each is existing else each for each in keys)


def _revoked(keys: tuple[KeyRecord, ...], key_id: str) -> tuple[KeyRecord, ...]:
    if all(key.key_id != key_id for key in keys):
        raise NotFound(f"there is no key {key_id[:100]!r}")
    now = time.time()
    return tuple(
        msgspec.structs.replace(key, revoked=now) if key.key_id == key_id and key.revoked is None else key
        for key in keys
    )
