"""Pools in AWS, planned, applied, changed and destroyed by Terraform over a stand-in with the provider's schema."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from stacks import needs_terraform, pool, stack
from stand_in_provider import SCHEMA
from test_aws_modules import aws_stack

from infra.changes import Change
from infra.stack import Pool, Stack
from infra.terraform import find_program
from infra.workspace import Workspace, digest_of, outputs, resources

pytestmark = [needs_terraform, pytest.mark.usefixtures("aws_provider")]


class Account:
    def __init__(self, folder: Path) -> None:
        self.workspace = Workspace(folder / "demo", find_program())

    def plan(self, wanted: Stack, *, destroy: bool = False) -> list[Change]:
        with self.workspace.locked():
            self.workspace.open(wanted)
            return list(self.workspace.plan(wanted, digest_of(wanted, b""), destroy=destroy).changes)

    def apply(self) -> None:
        with self.workspace.locked():
            self.workspace.apply(lambda _: None)


@pytest.fixture
def account(tmp_path: Path) -> Account:
    return Account(tmp_path)


def pools(*made: Pool) -> Stack:
    return msgspec.structs.replace(aws_stack(managed=True), pools=made)


def l40s(**fields: object) -> Pool:
    return pool("l40s", backend="aws", instance_type="g6e.12xlarge", **fields)


def test_the_life_of_a_pool_in_aws(account: Account) -> None:
    made = account.plan(pools(l40s()))
    assert {change.action for change in made} == {"create"}
    assert {change.resource for change in made if change.cost} == {
        "aws_autoscaling_group.nodes", "aws_s3_bucket.registry"
    }  # fmt: skip
    assert {change.pool for change in made} == {"l40s", None}, "the registry's bucket is of no single pool"
    account.apply()
    assert account.plan(pools(l40s())) == []
    assert outputs(account.workspace.state(), "pools")["l40s"]["autoscaling_group"] == "demo-l40s"

    (grown,) = account.plan(pools(l40s(desired=2, max=5)))
    assert (grown.action, grown.resource, grown.cost) == ("change", "aws_autoscaling_group.nodes", True)
    assert grown.reason == "differs in desired_capacity, max_size"
    account.apply()

    gone = account.plan(pools())
    assert {(change.action, change.pool, change.reason) for change in gone} == {
        ("destroy", "l40s", "no longer declared")
    }, "the bucket stays"
    everything = account.plan(pools(), destroy=True)
    assert {(change.action, change.reason) for change in everything} == {("destroy", "everything is destroyed")}
    account.apply()
    assert resources(account.workspace.state()) == []


def test_the_root_module_takes_the_provider_in_its_version(account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_REATTACH_PROVIDERS")
    with account.workspace.locked():
        account.workspace.open(pools(l40s()))
    locked = (account.workspace.directory / ".terraform.lock.hcl").read_text()
    assert f'version     = "{SCHEMA["provider"]}"' in locked


def test_a_stack_without_pools_in_aws_needs_no_provider(account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TF_CLI_CONFIG_FILE", "TF_REATTACH_PROVIDERS"):
        monkeypatch.delenv(name)
    assert account.plan(stack(pool(desired=0))) == []


def test_instances_have_what_they_need_until_they_have_drained(account: Account) -> None:
    """Terraform makes what others depend on first, and destroys it last."""
    account.plan(pools(l40s()))
    account.apply()
    (group,) = [entry for entry in resources(account.workspace.state()) if entry["type"] == "aws_autoscaling_group"]
    needed = {"iam_role_policy.node", "vpc_security_group_egress_rule.all", "vpc_security_group_ingress_rule.gateway"}
    assert {f"module.pool_l40s.aws_{name}" for name in needed} <= set(group["depends_on"])
    assert group["values"]["timeouts"][0]["delete"] == "72m", "longer than a drain may take, 3700 s"


def test_what_costs_money_has_the_tags(account: Account) -> None:
    """The provider's default tags do not reach instances and volumes of a group."""
    account.plan(pools(l40s()))
    account.apply()
    made = {entry["type"]: entry["values"] for entry in resources(account.workspace.state())}
    tags = {"Name": "demo-l40s", "garnish:service": "demo", "garnish:pool": "l40s", "team": "support"}
    template = made["aws_launch_template"]["tag_specifications"]
    assert {entry["resource_type"]: entry["tags"] for entry in template} == {"instance": tags, "volume": tags}
    assert {tag["key"]: tag["value"] for tag in made["aws_autoscaling_group"]["tag"]} == tags
    assert all(tag["propagate_at_launch"] for tag in made["aws_autoscaling_group"]["tag"])
