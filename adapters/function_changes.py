"""Changes of existing functions, each a compare-and-swap of function.json."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any

import msgspec

from adapters.aliases import checked_weights, history_room, rolled_back
from adapters.errors import InvalidRequest, NoSuchFunction, NotFound, PreconditionFailed
from adapters.functions import FunctionRecord, Policy, parse_policy, with_alias, with_aliases
from adapters.names import NAME_RULE, is_alias, is_name
from adapters.nearest import did_you_mean
from adapters.schedules import record_schedule
from adapters.standing import Memory, update_function
from adapters.store import ObjectStore


class FunctionChanges:
    """Changes functions' records in the store. Methods block, and may be called from any thread. `matches` are the
    generations that the function's record may have; None allows any."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store

    def set_alias(
        self, tenant: str, name: str, alias: str, weights: dict[str, float], matches: Collection[int] | None = None
    ) -> FunctionRecord:
        """Points a new or existing alias to versions by shares of the calls. Writes nothing if it already points there.
        Returns the function's record.

        Raises InvalidRequest (alias, weights), NotFound (function, version), Conflict or PreconditionFailed.
        """
        check_alias(alias)
        shares = checked_weights(weights)
        return self.change(tenant, name, matches, lambda record: with_alias(record, alias, shares, time.time()))

    def roll_back(
        self, tenant: str, name: str, alias: str = "latest", matches: Collection[int] | None = None
    ) -> FunctionRecord:
        """Points an alias to its previous target, and returns the function's record. Raises NotFound or
        PreconditionFailed, or Conflict when the alias has no earlier target."""

        def back(record: FunctionRecord) -> FunctionRecord:
            current = record.aliases.get(alias)
            if current is None:
                hint = did_you_mean(alias, record.aliases)
                raise NotFound(f"function {name} has no alias {alias[:100]!r}{hint}")
            earlier = rolled_back(current, record.numbers(), time.time(), history_room(len(record.aliases)))
            return with_aliases(record, {alias: earlier})

        return self.change(tenant, name, matches, back)

    def set_policy(
        self,
        tenant: str,
        name: str,
        policy: dict[str, Any],
        matches: Collection[int] | None = None,
        memory: Memory | None = None,
    ) -> FunctionRecord:
        """Changes the fields stated in `policy`, and returns the function's record. `memory`: limits for the
        provisioned copies. Raises InvalidRequest (which names the field), NotFound or PreconditionFailed, or Conflict
        when the copies do not fit."""
        parse_policy(policy, Policy(), within="")

        def apply(record: FunctionRecord) -> FunctionRecord:
            changed = parse_policy(policy, record.policy, within="")
            if changed == record.policy:
                return record
            if changed.warm:
                record_schedule(self.store, tenant, name)
            return msgspec.structs.replace(record, generation=record.generation + 1, policy=changed)

        return self.change(tenant, name, matches, apply, memory)

    def change(
        self,
        tenant: str,
        name: str,
        matches: Collection[int] | None,
        change: Callable[[FunctionRecord], FunctionRecord],
        memory: Memory | None = None,
    ) -> FunctionRecord:
        """Applies `change` to the record of an existing function, and returns the changed record. Raises what `change`
        and `update_function` raise. Raises NotFound, or PreconditionFailed when the generation is not in `matches`."""

        def apply(record: FunctionRecord | None) -> FunctionRecord:
            if record is None or record.deleted:
                raise NoSuchFunction(tenant, name)
            check_generation(record, matches)
            return change(record)

        if not is_name(name) or not is_name(tenant):
            raise NoSuchFunction(tenant, name)
        return update_function(self.store, tenant, name, apply, memory)


def check_options(alias: str | None, policy: dict[str, Any] | None) -> None:
    """Raises InvalidRequest for an alias or a policy that is invalid for a deploy."""
    if alias is not None:
        check_alias(alias)
    parse_policy(policy or {}, Policy())


def check_alias(alias: str) -> None:
    """Raises InvalidRequest for an invalid alias name."""
    if not is_alias(alias):
        raise InvalidRequest("alias", f"malformed alias {alias[:100]!r}: {NAME_RULE}, not all digits")


def check_generation(record: FunctionRecord, matches: Collection[int] | None) -> None:
    """Raises PreconditionFailed unless the record's generation is in `matches`, or that is None."""
    if matches is not None and record.generation not in matches:
        raise PreconditionFailed(
            f"function {record.name} has changed meanwhile: it is at generation {record.generation}"
        )
