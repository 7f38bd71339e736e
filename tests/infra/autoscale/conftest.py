"""Autoscaling groups at moto's server."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import boto3
import pytest

REGION = "us-east-1"
MakeGroup = Callable[[str, int, int], str]


@pytest.fixture(scope="session")
def clients(s3_endpoint: str) -> tuple[Any, Any]:
    """Of autoscaling and of EC2; the latter takes long to make."""
    group, ec2 = (boto3.client(name, region_name=REGION, endpoint_url=s3_endpoint) for name in ("autoscaling", "ec2"))
    return group, ec2


@pytest.fixture(scope="session")
def image(clients: tuple[Any, Any]) -> str:
    """Of any kind: moto's server lists hundreds, and takes long for that."""
    return str(clients[1].describe_images()["Images"][0]["ImageId"])


@pytest.fixture
def make_group(clients: tuple[Any, Any], image: str) -> Iterator[MakeGroup]:
    """Makes the group of a pool, from `least` (which it has) to `most` instances; returns the service's name."""
    group, ec2 = clients
    made: list[str] = []

    def make(pool: str, least: int, most: int) -> str:
        name = f"demo{uuid.uuid4().hex[:6]}"
        ec2.create_launch_template(
            LaunchTemplateName=name, LaunchTemplateData={"ImageId": image, "InstanceType": "g6e.xlarge"}
        )
        group.create_auto_scaling_group(
            AutoScalingGroupName=f"{name}-{pool}",
            LaunchTemplate={"LaunchTemplateName": name, "Version": "1"},
            MinSize=least,
            DesiredCapacity=least,
            MaxSize=most,
            AvailabilityZones=[f"{REGION}a"],
        )
        made.append(f"{name}-{pool}")
        return name

    yield make
    for name in made:
        group.delete_auto_scaling_group(AutoScalingGroupName=name, ForceDelete=True)
