"""The changes in a saved plan: for each resource the action, the reason, and whether the resource is billed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

ACTIONS = {
    ("create",): "create",
    ("update",): "change",
    ("delete", "create"): "replace",
    ("create", "delete"): "replace",
    ("delete",): "destroy",
}
COST_BEARING = frozenset({"aws_autoscaling_group", "aws_s3_bucket", "aws_instance", "aws_ebs_volume"})
"""Types of resources that AWS bills. The instances of the autoscaling group are most of the cost."""

BROKEN_OFF = "its creation did not end well"
REASONS = {
    "replace_because_tainted": BROKEN_OFF,
    "replace_because_cannot_update": "can't be changed in place",
    "replace_by_triggers": "the nodes' settings have changed",
    "replace_by_request": "asked for",
    "delete_because_no_resource_config": "no longer declared",
    "delete_because_no_module": "no longer declared",
    "delete_because_each_key": "fewer nodes are desired",
    "delete_because_count_index": "fewer are desired",
    "delete_because_wrong_repetition": "no longer declared in this form",
    "delete_because_no_move_target": "no longer declared",
}
_MODULE = re.compile(r"module\.pool_([A-Za-z0-9_-]+)")


class Change(msgspec.Struct, frozen=True, kw_only=True):
    action: str
    pool: str | None
    resource: str
    address: str
    reason: str
    cost: bool


def changes_of(
    shown: Mapping[str, Any], pools: Mapping[str, str], dead: Mapping[str, str], *, destroy: bool = False
) -> list[Change]:
    """Returns the changes in a plan, sorted by pool and address.

    `shown` is the output of `terraform show -json`. `pools` maps modules to pools. `dead` maps addresses of failed
    nodes to the causes of their failures.
    """
    changes = []
    for entry in shown.get("resource_changes", ()):
        action = ACTIONS.get(tuple(entry["change"]["actions"]))
        if action is not None and entry.get("mode", "managed") == "managed":
            changes.append(_change(entry, action, pools, dead, destroy))
    return sorted(changes, key=lambda change: (change.pool or "", _natural(change.address)))


def _change(
    entry: Mapping[str, Any], action: str, pools: Mapping[str, str], dead: Mapping[str, str], destroy: bool
) -> Change:
    address = str(entry["address"])
    module = _MODULE.match(address)
    key = entry.get("index")
    return Change(
        action=action,
        pool=pools.get(module[0].removeprefix("module."), module[1]) if module else None,
        resource=str(key) if entry["type"] == "terraform_data" and key is not None else _short(entry),
        address=address,
        reason=dead.get(address) or ("everything is destroyed" if destroy else _reason(entry, action)),
        cost=entry["type"] in COST_BEARING,
    )


def _reason(entry: Mapping[str, Any], action: str) -> str:
    reason = REASONS.get(str(entry.get("action_reason", "")))
    changed = _changed(entry["change"])
    if action == "replace" and "triggers_replace" in changed:
        return REASONS["replace_by_triggers"]
    if reason is not None:
        is_specific = action == "replace" and reason == REASONS["replace_because_cannot_update"] and changed
        return f"{reason}: {', '.join(changed)}" if is_specific else reason
    if action == "create":
        return "not there yet"
    if action == "change" and entry["type"] == "terraform_data":
        return "how it is started; it keeps running"
    return f"differs in {', '.join(changed)}" if changed else "differs"


def _changed(change: Mapping[str, Any]) -> list[str]:
    """Returns the names of the attributes that change. Their values are left out, since they may be long."""
    before, after = change.get("before") or {}, change.get("after") or {}
    return sorted(name for name in after if before.get(name) != after[name])


def _short(entry: Mapping[str, Any]) -> str:
    index = entry.get("index")
    return f"{entry['type']}.{entry['name']}" + (f"[{index}]" if index is not None else "")


def _natural(address: str) -> list[tuple[int, str]]:
    """Returns a sort key that compares digits as numbers: `here-2` sorts before `here-10`."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", address)]
