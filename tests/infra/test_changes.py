"""Rows of a plan, from Terraform's documented JSON form."""

from __future__ import annotations

from typing import Any

import pytest

from infra.changes import Change, changes_of


def entry(
    actions: list[str], address: str = 'module.pool_a.terraform_data.node["a-1"]', **fields: Any
) -> dict[str, Any]:
    given = {"type": "terraform_data", "name": "node", "index": "a-1", "mode": "managed"}
    change = {"actions": actions, "before": fields.pop("before", None), "after": fields.pop("after", {})}
    return {"address": address, "change": change, **given, **fields}


def only(shown: dict[str, Any], **given: Any) -> Change:
    (found,) = changes_of({"resource_changes": [shown]}, {"pool_a": "a"}, given.pop("dead", {}), **given)
    return found


@pytest.mark.parametrize("actions", [["no-op"], ["read"]])
def test_what_does_nothing_is_no_row(actions: list[str]) -> None:
    assert changes_of({"resource_changes": [entry(actions)]}, {}, {}) == []


def test_data_is_no_row() -> None:
    assert changes_of({"resource_changes": [entry(["create"], mode="data")]}, {}, {}) == []


def test_a_change_in_place_names_what_differs() -> None:
    found = only(entry(["update"], before={"a": 1, "b": 2}, after={"a": 1, "b": 3}, type="aws_iam_role"))
    assert (found.action, found.reason, found.pool) == ("change", "differs in b", "a")


def test_a_change_of_a_process_says_that_it_goes_on() -> None:
    assert (
        only(entry(["update"], before={"input": 1}, after={"input": 2})).reason == "how it is started; it keeps running"
    )


def test_a_replacement_names_what_forces_it() -> None:
    told = "replace_because_cannot_update"
    found = only(entry(["delete", "create"], before={"image": 1}, after={"image": 2}, action_reason=told))
    assert (found.action, found.reason) == ("replace", "can't be changed in place: image")


def test_a_dead_process_is_the_reason() -> None:
    shown = entry(["create", "delete"], action_reason="replace_by_request")
    assert only(shown, dead={shown["address"]: "its process has died"}).reason == "its process has died"


def test_destroying_everything_needs_no_other_reason() -> None:
    assert only(entry(["delete"]), destroy=True).reason == "everything is destroyed"


def test_what_bears_on_cost_is_marked() -> None:
    group = entry(["create"], "module.pool_a.aws_autoscaling_group.nodes", type="aws_autoscaling_group", name="nodes")
    del group["index"]
    found = only(group)
    assert (found.cost, found.resource) == (True, "aws_autoscaling_group.nodes")
    assert not only(entry(["create"])).cost


def test_rows_are_in_the_order_of_pools_and_numbers() -> None:
    shown = [entry(["create"], f'module.pool_a.terraform_data.node["a-{n}"]', index=f"a-{n}") for n in (10, 2, 1)]
    assert [row.resource for row in changes_of({"resource_changes": shown}, {}, {})] == ["a-1", "a-2", "a-10"]
