"""The part of the root module that belongs to the backend `aws`: provider, pools, the registry's bucket."""

from __future__ import annotations

from typing import Any

import msgspec

from infra.errors import InfraError
from infra.instances import devices_of
from infra.stack import AwsHost, Pool, RegistryBucket, Stack, module_name
from infra.text import literal

Block = dict[str, Any]
PROVIDER = {"aws": {"source": "hashicorp/aws", "version": ">= 6.0, < 7.0"}}


class AwsParts(msgspec.Struct, frozen=True):
    modules: dict[str, Block] = {}
    providers: Block = {}


def aws_parts(stack: Stack) -> AwsParts:
    """Returns the modules and providers of the stack's part in AWS; none for a stack without AWS. One with AWS and
    without pools keeps the registry's bucket, and what Terraform needs to destroy pools that were there. Raises
    InfraError without a registry on S3."""
    if stack.aws is None:
        return AwsParts()
    if stack.registry is None:
        raise InfraError("registry: nodes in AWS need a registry on S3, s3://bucket/prefix")
    modules = {module_name(pool.name): _pool(stack, pool, stack.aws, stack.registry) for pool in stack.aws_pools}
    if stack.registry.managed:
        modules["registry"] = {"source": "./modules/aws_registry", "bucket": literal(stack.registry.bucket)}
    tags = {"garnish:service": stack.service, **dict(sorted(stack.aws.tags.items()))}
    provider = {"region": literal(stack.aws.region), "default_tags": {"tags": literal(tags)}}
    return AwsParts(modules, {"aws": provider})


def _pool(stack: Stack, pool: Pool, host: AwsHost, registry: RegistryBucket) -> Block:
    kind = pool.instance_type or ""
    settings = {
        "service": stack.service,
        "pool": pool.name,
        "instance_type": kind,
        "devices": devices_of(kind, host.devices, f"node_pools.{pool.name}.instance_type"),
        "min": pool.min,
        "desired": pool.desired,
        "max": pool.max,
        "vpc_id": host.vpc_id,
        "subnet_ids": host.subnet_ids,
        "gateway_security_group_id": host.gateway_security_group_id,
        "gateway_url": host.gateway_url,
        "secret_parameter": host.secret_parameter,
        "secret_kms_key_arn": host.secret_kms_key_arn,
        "image_parameter": host.image_parameter,
        "package": host.package,
        "model_source": host.model_source,
        "registry_bucket": registry.bucket,
        "registry_prefix": registry.prefix,
        "node_file": host.node_file,
        "volume_gib": host.volume_gib,
        "target_group_arns": host.target_group_arns,
        "tags": dict(sorted(host.tags.items())) or None,
    }
    stated = {name: value for name, value in settings.items() if value not in (None, [])}
    return {"source": "./modules/aws_pool", **literal(stated)}
