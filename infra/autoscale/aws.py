"""The driver of pools in AWS: sizes of autoscaling groups, within the bounds that Terraform gave them."""

from __future__ import annotations

from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

from infra.autoscale.driver import PoolSize, Throttled, check_bounds
from infra.errors import InfraError
from infra.terraform import missing_credentials

THROTTLED = frozenset({"Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequestsException"})
DENIED = frozenset({"AccessDenied", "AccessDeniedException", "UnauthorizedOperation"})
TIMEOUTS = Config(connect_timeout=5, read_timeout=20, retries={"mode": "standard", "max_attempts": 3})
LIVE = frozenset({"Pending", "Pending:Wait", "Pending:Proceed", "InService"})


class AwsDriver:
    """The groups are those of the module aws_pool: SERVICE-POOL."""

    def __init__(self, service: str, region: str, endpoint_url: str | None = None) -> None:
        self._service = service
        self._client: Any = boto3.client("autoscaling", region_name=region, endpoint_url=endpoint_url, config=TIMEOUTS)

    def size(self, pool: str) -> PoolSize:
        group = self._group(pool)
        live = sum(instance["LifecycleState"] in LIVE for instance in group["Instances"])
        return PoolSize(min=group["MinSize"], desired=group["DesiredCapacity"], max=group["MaxSize"], live=live)

    def set_desired(self, pool: str, size: int) -> None:
        """AWS checks the bounds too, but not every server that speaks its language does."""
        known = self.size(pool)
        check_bounds(pool, size, known)
        if known.desired != size:
            self._call(
                "set_desired_capacity",
                AutoScalingGroupName=self._name(pool),
                DesiredCapacity=size,
                HonorCooldown=False,  # our own windows steady the size
            )

    def _group(self, pool: str) -> dict[str, Any]:
        name = self._name(pool)
        found = self._call("describe_auto_scaling_groups", AutoScalingGroupNames=[name])["AutoScalingGroups"]
        groups: list[dict[str, Any]] = [group for group in found if group["AutoScalingGroupName"] == name]
        if len(groups) != 1:
            count = "no autoscaling group" if not groups else f"{len(groups)} autoscaling groups"
            raise InfraError(f"node_pools.{pool}: there is {count} {name}; `garnish infra apply` makes it")
        if groups[0].get("Status"):
            raise InfraError(f"node_pools.{pool}: the autoscaling group {name} is being deleted")
        return groups[0]

    def _name(self, pool: str) -> str:
        return f"{self._service}-{pool}"

    def _call(self, operation: str, **arguments: Any) -> Any:
        try:
            return getattr(self._client, operation)(**arguments)
        except NoCredentialsError:
            raise InfraError(missing_credentials()) from None
        except ClientError as error:
            raise _explained(operation, error) from error
        except BotoCoreError as error:
            raise InfraError(f"autoscaling: {operation} failed: {error}") from error


def _explained(operation: str, error: ClientError) -> InfraError:
    code = error.response.get("Error", {}).get("Code", "")
    action = "".join(part.capitalize() for part in operation.split("_"))
    if code in THROTTLED:
        return Throttled(f"autoscaling: {action} was throttled by AWS; the next round tries again")
    if code in DENIED:
        return InfraError(f"autoscaling: the permission autoscaling:{action} is missing")
    if code == "ScalingActivityInProgress":
        return Throttled(f"autoscaling: {action} must wait for a scaling activity to end")
    return InfraError(f"autoscaling: {action} failed: {code}: {error.response.get('Error', {}).get('Message', '')}")
