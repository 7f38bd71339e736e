"""Autoscaling groups at moto's server."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator

import boto3
import pytest

REGION = "us-east-1"
MakeGroup = Callable[[str, int, int], str]


@pytest.fixture
def make_group(s3_endpoint: str) -> Iterator[MakeGroup]:
    """Makes the group of a pool, from `least` (which it has) to `most` instances; returns the service's name."""
    group = boto3.client("autoscaling", region_name=REGION, endpoint_url=s3_endpoint)
    ec2 = boto3.client("ec2", region_name=REGION, endpoint_url=s3_endpoint)
    made: list[str] = []

    def make(pool: str, least: int, most: int) -> str:
        name = f"demo{uuid.uuid4().hex[:6]}"
        image = ec2.describe_images()["Images"][0]["ImageId"]
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
