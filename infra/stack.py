"""Types for the desired state of a service's node pools, which is the input of `render`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from adapters.names import NAME_RULE, is_name
from adapters.s3_url import S3Place
from infra.errors import InfraError

MAX_LOCAL_NODES = 64
UP_POOL = "node"
"""Name that no pool may have, since the nodes of `garnish up` have the ids node-1, node-2, ..."""


Text = Annotated[str, Meta(min_length=1, max_length=1000)]


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    backend: Literal["aws", "local"]
    min: int = 0
    desired: int = 1
    stated: int | None = None
    """`desired` in serverless.yml if the autoscaler has set another size; else None"""
    max: int = 1
    instance_type: str | None = None


class LocalHost(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of nodes of the `local` backend. All paths are absolute; the secret is given by its file."""

    program: tuple[str, ...]
    service_file: str
    state: str
    gateway_url: str
    secret_file: str
    registry: str
    revision: str
    """digest of everything that a node reads at its start; nodes are replaced when it changes"""


class Aws(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    # The section `infra.aws` of serverless.yml. A docstring would appear in that file's JSON Schema.
    region: Text
    vpc_id: Text
    subnet_ids: Annotated[list[Text], Meta(min_length=1)]
    gateway_security_group_id: Text
    secret_parameter: Text
    secret_kms_key_arn: Text | None = None
    package: Text
    image_parameter: Text
    model_source: Text
    registry_bucket: Literal["existing", "managed"] = "existing"
    volume_gib: Annotated[int, Meta(ge=30, le=16_384)] = 100
    target_group_arns: list[Text] = []
    tags: dict[str, Text] = {}


class AwsHost(Aws, frozen=True, kw_only=True):
    """Settings of the `aws` backend, for the account and for its instances. Secrets are given by name only."""

    gateway_url: str
    node_file: str
    devices: Sequence[int] | None = None
    """indices of the GPUs of an instance that get a node; None means all GPUs"""


class RegistryBucket(msgspec.Struct, frozen=True, kw_only=True):
    """The registry's place on S3. With `managed` Terraform creates the bucket."""

    bucket: str
    prefix: str
    managed: bool = False


class Stack(msgspec.Struct, frozen=True, kw_only=True):
    service: str
    pools: tuple[Pool, ...]
    local: LocalHost
    aws: AwsHost | None = None
    registry: RegistryBucket | None = None
    state: S3Place | None = None
    """place of Terraform's state on S3; None means a file next to the root module"""

    @property
    def local_pools(self) -> tuple[Pool, ...]:
        return tuple(pool for pool in self.pools if pool.backend == "local")

    @property
    def aws_pools(self) -> tuple[Pool, ...]:
        return tuple(pool for pool in self.pools if pool.backend == "aws")


def sharing_nodes(bounds: Iterable[int]) -> int:
    """Returns the number of equal parts into which the host's cores are divided among local nodes.

    It is the sum of the pools' `max` (`bounds`), at least 1. It does not depend on the current sizes, so that scaling
    does not change the share of existing nodes.
    """
    return max(1, sum(bounds))


def module_name(pool: str) -> str:
    """Returns the name of a pool's module in the root module, without dots."""
    return "pool_" + pool.replace(".", "_")


def node_ids(pool: str, count: int) -> list[str]:
    """Returns the ids of the nodes of a local pool that has `count` nodes."""
    return [f"{pool}-{number + 1}" for number in range(count)]


def pool_of(node: str) -> str:
    """Returns the name of a local node's pool, derived from the node's id."""
    return node.rpartition("-")[0]


def check_stack(stack: Stack) -> None:
    """Checks the conditions that the checks of serverless.yml do not cover. Raises InfraError."""
    if not is_name(stack.service):
        raise InfraError(
            f"service: {stack.service!r} names a folder, tags and resources of node pools; expected {NAME_RULE}"
        )
    modules: dict[str, str] = {}
    for pool in stack.pools:
        _check_pool(pool)
        first_name = modules.setdefault(module_name(pool.name), pool.name)
        if first_name != pool.name:
            raise InfraError(f"node_pools: {first_name} and {pool.name} are one name to Terraform; rename one of them")
    if stack.aws_pools and stack.aws is None:
        raise InfraError(f"node_pools.{stack.aws_pools[0].name}: the backend aws needs the section infra.aws")


def _check_pool(pool: Pool) -> None:
    where = f"node_pools.{pool.name}"
    if not pool.min <= pool.desired <= pool.max:
        raise InfraError(f"{where}: expected min <= desired <= max, found {pool.min}, {pool.desired}, {pool.max}")
    if pool.name == UP_POOL:
        raise InfraError(f"{where}: `garnish up` names its nodes {UP_POOL}-1, ...; give the pool another name")
    if pool.backend == "aws" and pool.instance_type is None:
        raise InfraError(f"{where}: the backend aws needs an instance_type")
    if pool.backend == "local" and pool.instance_type is not None:
        raise InfraError(f"{where}: the backend local uses this host alone, and takes no instance_type")
    if pool.backend == "local" and pool.max > MAX_LOCAL_NODES:
        raise InfraError(f"{where}: the backend local has at most {MAX_LOCAL_NODES} nodes, found max {pool.max}")
