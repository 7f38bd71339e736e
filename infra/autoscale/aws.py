"""Driver of pools in AWS: sets the sizes of autoscaling groups, within the bounds set by Terraform."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

from infra.autoscale.driver import Deferred, PoolSize, check_bounds
from infra.errors import InfraError
from infra.terraform import missing_credentials

THROTTLED = frozenset(
    {
        "Throttling", "ThrottlingException", "ThrottledException", "RequestThrottled", "RequestThrottledException",
        "RequestLimitExceeded", "TooManyRequestsException", "SlowDown",
    }
)  # fmt: skip
BUSY = frozenset({"ScalingActivityInProgress", "ResourceContention"})
"""Error codes of AWS while another change of the group is in progress."""
DENIED = frozenset({"AccessDenied", "AccessDeniedException", "UnauthorizedOperation"})
TIMEOUTS = Config(connect_timeout=5, read_timeout=20, retries={"mode": "standard", "max_attempts": 3})
LIVE = frozenset({"Pending", "Pending:Wait", "Pending:Proceed", "InService"})


class AwsDriver:
    """Reads and sets the sizes of the autoscaling groups SERVICE-POOL, created by the Terraform module aws_pool.

    Raises InfraError if the AWS client can't be created.
    """

    def __init__(
        self,
        service: str,
        region: str,
        endpoint_url: str | None = None,
        failed: Callable[[], Collection[str]] = frozenset,
    ) -> None:
        """`failed` returns the ids of nodes whose GPU has failed, which have the form POOL-INSTANCE-GPU.

        `endpoint_url` is the URL of another server with the API of AWS; None means AWS.
        """
        self._service, self._failed = service, failed
        try:
            self._client: Any = boto3.client(
                "autoscaling", region_name=region, endpoint_url=endpoint_url, config=TIMEOUTS
            )
        except BotoCoreError as error:  # for example a missing profile
            raise InfraError(f"AWS can't be asked for autoscaling groups: {error}") from error

    def size(self, pool: str) -> PoolSize:
        group = self._group(pool)
        live = sum(instance["LifecycleState"] in LIVE for instance in group["Instances"])
        return PoolSize(
            min=group["MinSize"],
            desired=group["DesiredCapacity"],
            max=group["MaxSize"],
            live=live,
            settled=not self._healthy_with_failed_gpu(pool, group),
        )

    def set_desired(self, pool: str, size: int) -> None:
        """Sets the group's desired capacity, and marks instances with a failed GPU as unhealthy.

        The group replaces unhealthy instances after it has drained their other nodes. Raises InfraError for a size
        outside the bounds, since not all servers with the API of AWS check the bounds.
        """
        current = self.size(pool)
        check_bounds(pool, size, current)
        for instance in [] if current.settled else self._healthy_with_failed_gpu(pool, self._group(pool)):
            self._call(
                "set_instance_health", InstanceId=instance, HealthStatus="Unhealthy", ShouldRespectGracePeriod=False
            )
        if current.desired != size:
            self._call(
                "set_desired_capacity",
                AutoScalingGroupName=self._name(pool),
                DesiredCapacity=size,
                HonorCooldown=False,  # the windows of `sizing` already smooth the size
            )

    def _healthy_with_failed_gpu(self, pool: str, group: dict[str, Any]) -> list[str]:
        """Returns the ids of instances that have a failed GPU and are healthy according to the group."""
        serving = [instance for instance in group["Instances"] if instance["LifecycleState"] == "InService"]
        healthy = [str(instance["InstanceId"]) for instance in serving if instance.get("HealthStatus") == "Healthy"]
        failed = self._failed() if healthy else ()
        return [name for name in healthy if any(node.startswith(f"{pool}-{name}-") for node in failed)]

    def _group(self, pool: str) -> dict[str, Any]:
        name = self._name(pool)
        listed = self._call("describe_auto_scaling_groups", AutoScalingGroupNames=[name])["AutoScalingGroups"]
        groups: list[dict[str, Any]] = [group for group in listed if group["AutoScalingGroupName"] == name]
        if len(groups) != 1:
            count = "no autoscaling group" if not groups else f"{len(groups)} autoscaling groups"
            raise InfraError(f"node_pools.{pool}: there is {count} {name}; `garnish infra apply` makes it")
        if groups[0].get("Status"):
            raise InfraError(f"node_pools.{pool}: the autoscaling group {name} is being deleted")
        owner = _owner(groups[0], self._service, pool)
        if owner != (self._service, pool):
            raise InfraError(
                f"node_pools.{pool}: the autoscaling group {name} belongs to the pool {owner[1]} of the service "
                f"{owner[0]}"
            )
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


def _owner(group: dict[str, Any], service: str, pool: str) -> tuple[str, str]:
    """Returns (service, pool) of the group according to its tags.

    The group's name is ambiguous: a-b-c may be the pool b-c of the service a, or the pool c of a-b. `service` and
    `pool` replace missing tags.
    """
    tags = {tag["Key"]: tag["Value"] for tag in group.get("Tags", ())}
    return tags.get("garnish:service", service), tags.get("garnish:pool", pool)


def _explained(operation: str, error: ClientError) -> InfraError:
    code = error.response.get("Error", {}).get("Code", "")
    action = "".join(part.capitalize() for part in operation.split("_"))
    if code in THROTTLED:
        return Deferred(f"autoscaling: {action} was throttled by AWS; the next round tries again")
    if code in DENIED:
        return InfraError(f"autoscaling: the permission autoscaling:{action} is missing")
    if code in BUSY:
        return Deferred(f"autoscaling: {action} must wait for another change of the group to end")
    return InfraError(f"autoscaling: {action} failed: {code}: {error.response.get('Error', {}).get('Message', '')}")
