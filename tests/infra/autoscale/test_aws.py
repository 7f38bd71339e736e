"""The driver of autoscaling groups against moto's server; what that lets pass, the driver checks by itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from botocore.stub import Stubber

from infra.autoscale.aws import AwsDriver
from infra.autoscale.driver import Deferred, PoolSize
from infra.errors import InfraError
from tests.infra.autoscale.conftest import REGION, MakeGroup


@pytest.fixture
def service(make_group: MakeGroup) -> str:
    """A service with the group of a pool `l40s`, 1 to 4 instances."""
    return make_group("l40s", 1, 4)


def test_a_size_is_set_and_told(service: str, s3_endpoint: str) -> None:
    driver = AwsDriver(service, REGION, s3_endpoint)
    assert driver.size("l40s") == PoolSize(min=1, desired=1, max=4, live=1)
    driver.set_desired("l40s", 3)
    assert driver.size("l40s") == PoolSize(min=1, desired=3, max=4, live=3)
    driver.set_desired("l40s", 3)
    driver.set_desired("l40s", 1)
    assert driver.size("l40s").desired == 1


def test_an_instance_whose_gpu_has_failed_is_called_unhealthy(
    service: str, s3_endpoint: str, clients: tuple[Any, Any]
) -> None:
    """Once; the group replaces it."""
    failed: list[str] = []
    driver = AwsDriver(service, REGION, s3_endpoint, failed=lambda: failed)
    client, _ = clients

    def health() -> dict[str, str]:
        (group,) = client.describe_auto_scaling_groups(AutoScalingGroupNames=[f"{service}-l40s"])["AutoScalingGroups"]
        return {instance["InstanceId"]: instance["HealthStatus"] for instance in group["Instances"]}

    driver.set_desired("l40s", 2)
    first, second = health()
    failed[:] = [f"other-{second}-0", "l40s-i-0-0"]
    assert driver.size("l40s").settled
    failed.append(f"l40s-{first}-3")
    assert not driver.size("l40s").settled
    driver.set_desired("l40s", 2)
    assert (health()[first], health()[second]) == ("Unhealthy", "Healthy")
    assert driver.size("l40s").settled


@pytest.mark.parametrize("size", [0, 5, -1])
def test_a_size_outside_the_bounds_is_refused(service: str, s3_endpoint: str, size: int) -> None:
    driver = AwsDriver(service, REGION, s3_endpoint)
    with pytest.raises(InfraError, match=rf"node_pools\.l40s: the size {size} is outside its bounds, 1 to 4"):
        driver.set_desired("l40s", size)
    assert driver.size("l40s").desired == 1


def test_a_pool_that_was_never_applied(service: str, s3_endpoint: str) -> None:
    with pytest.raises(InfraError, match=r"no autoscaling group .*-other; `garnish infra apply` makes it"):
        AwsDriver(service, REGION, s3_endpoint).set_desired("other", 1)


def group(**changes: Any) -> dict[str, Any]:
    """As AWS describes one."""
    given = {
        "AutoScalingGroupName": "demo-l40s", "MinSize": 1, "MaxSize": 4, "DesiredCapacity": 1, "DefaultCooldown": 300,
        "AvailabilityZones": ["us-east-1a"], "HealthCheckType": "EC2", "CreatedTime": 0, "Instances": [],
        "Tags": [{"Key": "garnish:service", "Value": "demo"}, {"Key": "garnish:pool", "Value": "l40s"}],
    }  # fmt: skip
    return {**given, **changes}


@pytest.fixture
def answered() -> Iterator[tuple[AwsDriver, Stubber]]:
    """A driver whose answers are given, for what moto's server can't be made to say."""
    driver = AwsDriver("demo", REGION, "http://127.0.0.1:9")
    with Stubber(driver._client) as stubber:
        yield driver, stubber


@pytest.mark.parametrize(
    ("code", "kind", "told"),
    [
        ("Throttling", Deferred, "DescribeAutoScalingGroups was throttled"),
        ("RequestThrottled", Deferred, "DescribeAutoScalingGroups was throttled"),
        ("ResourceContention", Deferred, "DescribeAutoScalingGroups must wait for another change"),
        ("AccessDenied", InfraError, "the permission autoscaling:DescribeAutoScalingGroups is missing"),
        ("ValidationError", InfraError, "DescribeAutoScalingGroups failed: ValidationError"),
    ],
)
def test_refusals_of_aws(answered: tuple[AwsDriver, Stubber], code: str, kind: type[Exception], told: str) -> None:
    driver, stubber = answered
    stubber.add_client_error("describe_auto_scaling_groups", code, http_status_code=400)
    with pytest.raises(kind, match=told):
        driver.size("l40s")


def test_an_activity_in_progress_is_waited_for(answered: tuple[AwsDriver, Stubber]) -> None:
    driver, stubber = answered
    stubber.add_response("describe_auto_scaling_groups", {"AutoScalingGroups": [group()]})
    stubber.add_client_error("set_desired_capacity", "ScalingActivityInProgress", http_status_code=400)
    with pytest.raises(Deferred, match="SetDesiredCapacity must wait"):
        driver.set_desired("l40s", 2)


@pytest.mark.parametrize(
    ("groups", "told"),
    [
        ([group(), group()], "2 autoscaling groups"),
        ([group(Status="Delete in progress")], "is being deleted"),
        (
            [group(Tags=[{"Key": "garnish:service", "Value": "de"}, {"Key": "garnish:pool", "Value": "mo-l40s"}])],
            "demo-l40s belongs to the pool mo-l40s of the service de",
        ),
    ],
)
def test_groups_that_can_not_be(answered: tuple[AwsDriver, Stubber], groups: list[dict[str, Any]], told: str) -> None:
    driver, stubber = answered
    stubber.add_response("describe_auto_scaling_groups", {"AutoScalingGroups": groups})
    with pytest.raises(InfraError, match=told):
        driver.size("l40s")


def test_what_ends_does_not_live(answered: tuple[AwsDriver, Stubber]) -> None:
    driver, stubber = answered
    states = ["InService", "Pending:Wait", "Terminating:Wait", "Standby"]
    instances = [
        {
            "InstanceId": f"i-{state}", "AvailabilityZone": "us-east-1a", "LifecycleState": state,
            "HealthStatus": "Healthy", "ProtectedFromScaleIn": False,
        }
        for state in states
    ]  # fmt: skip
    stubber.add_response("describe_auto_scaling_groups", {"AutoScalingGroups": [group(Instances=instances)]})
    assert driver.size("l40s").live == 2


def test_nobody_answers(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the credentials that the endpoint's fixture sets, and nobody at the address."""
    monkeypatch.setattr(time, "sleep", lambda _: None)  # between the attempts
    with pytest.raises(InfraError, match="describe_auto_scaling_groups failed"):
        AwsDriver("demo", REGION, "http://127.0.0.1:9").size("l40s")


def test_a_profile_that_is_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(InfraError, match=r"AWS can't be asked .*\(nobody\)"):
        AwsDriver("demo", REGION)


def test_instances_that_are_protected_stay(service: str, s3_endpoint: str, clients: tuple[Any, Any]) -> None:
    """The size is what is desired; AWS ends no protected instance for it, and the driver does not wait for that."""
    driver = AwsDriver(service, REGION, s3_endpoint)
    driver.set_desired("l40s", 3)
    client, _ = clients
    name = f"{service}-l40s"
    (described,) = client.describe_auto_scaling_groups(AutoScalingGroupNames=[name])["AutoScalingGroups"]
    client.set_instance_protection(
        AutoScalingGroupName=name,
        InstanceIds=[instance["InstanceId"] for instance in described["Instances"]],
        ProtectedFromScaleIn=True,
    )
    driver.set_desired("l40s", 1)
    assert driver.size("l40s") == PoolSize(min=1, desired=1, max=4, live=3)
