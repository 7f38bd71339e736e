"""Renders a stack as a Terraform root module, together with the modules that it uses.

The root module is JSON in a stable order, so that differences can be reviewed.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from infra.errors import InfraError
from infra.instances import devices_of
from infra.stack import AwsHost, Pool, RegistryBucket, Stack, check_stack, module_name, sharing_nodes
from infra.text import literal, write_atomically

MODULES = Path(__file__).with_name("modules")
ROOT_FILE = "main.tf.json"
STATE_FILE = "terraform.tfstate"
REQUIRED_VERSION = ">= 1.10"
"""Version constraint. Both Terraform and OpenTofu can lock a state on S3 without a DynamoDB table since 1.10."""
NOTE = "Made by `garnish infra render` from serverless.yml: edit that file, not this one."

Block = dict[str, Any]
PROVIDER = {"aws": {"source": "hashicorp/aws", "version": ">= 6.0, < 7.0"}}


def render(stack: Stack) -> Block:
    """Returns the root module. Raises InfraError for an invalid stack."""
    check_stack(stack)
    modules = {module_name(pool.name): _local_module(stack, pool) for pool in stack.local_pools}
    terraform: Block = {"required_version": REQUIRED_VERSION, "backend": _backend(stack)}
    root: Block = {"//": NOTE, "terraform": terraform}
    if stack.aws is not None:
        modules |= _aws_modules(stack, stack.aws)
        terraform["required_providers"] = PROVIDER
        root["provider"] = {"aws": _aws_provider(stack.service, stack.aws)}
    if modules:
        root["module"] = {name: modules[name] for name in sorted(modules)}
    root["output"] = {
        "service": {"value": literal(stack.service), "description": "The service that these pools belong to."},
        "pools": {
            "value": {pool.name: _pool_output(pool) for pool in sorted(stack.pools, key=lambda pool: pool.name)},
            "description": "Bounds, desired size and nodes of each pool.",
        },
    }
    return root


def text_of(root: Block) -> str:
    return json.dumps(root, indent=2, ensure_ascii=False) + "\n"


def write_root(stack: Stack, directory: Path) -> str:
    """Writes the root module and the modules that it uses, and returns the root module's text.

    Other files in the directory are not changed. Raises InfraError.
    """
    root = render(stack)
    text = text_of(root)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_modules(directory / "modules", {Path(part["source"]).name for part in root.get("module", {}).values()})
        write_atomically(directory / ROOT_FILE, text)
    except OSError as error:
        raise InfraError(f"{error.filename or directory}: {error.strerror}") from error
    return text


def _local_module(stack: Stack, pool: Pool) -> Block:
    host = stack.local
    return {
        "source": "./modules/local_pool",
        **literal(
            {
                "service": stack.service,
                "pool": pool.name,
                "min": pool.min,
                "desired": pool.desired,
                "max": pool.max,
                "program": host.program,
                "host": {
                    "service_file": host.service_file,
                    "state": host.state,
                    "gateway_url": host.gateway_url,
                    "secret_file": host.secret_file,
                    "registry": host.registry,
                },
                "host_nodes": sharing_nodes(pool.max for pool in stack.local_pools),
                "revision": host.revision,
            }
        ),
    }


def _pool_output(pool: Pool) -> Block:
    created_by = "nodes" if pool.backend == "local" else "autoscaling_group"
    return {
        "backend": pool.backend,
        "min": pool.min,
        "desired": pool.desired,
        "max": pool.max,
        created_by: f"${{module.{module_name(pool.name)}.{created_by}}}",
    }


def _backend(stack: Stack) -> Block:
    """Returns the Terraform backend for the state. For S3 the environment provides region and credentials."""
    if stack.state is None:
        return {"local": {"path": STATE_FILE}}
    key = "/".join(part for part in (stack.state.prefix, stack.service, STATE_FILE) if part)
    return {"s3": {"bucket": stack.state.bucket, "key": key, "encrypt": True, "use_lockfile": True}}


def _write_modules(target: Path, names: set[str]) -> None:
    """Writes the modules `names`, and removes this package's other modules. Foreign modules are not changed."""
    for old in sorted(MODULES.iterdir()):
        shutil.rmtree(target / old.name, ignore_errors=True)
    for name in sorted(names):
        shutil.copytree(MODULES / name, target / name, ignore=shutil.ignore_patterns("tests", ".terraform*"))


def _aws_modules(stack: Stack, host: AwsHost) -> dict[str, Block]:
    """Returns the module blocks for AWS: those of the pools and of the registry's bucket.

    Raises InfraError if the registry is not on S3.
    """
    if stack.registry is None:
        raise InfraError("registry: nodes in AWS need a registry on S3, s3://bucket/prefix")
    modules = {module_name(pool.name): _aws_pool(stack.service, pool, host, stack.registry) for pool in stack.aws_pools}
    if stack.registry.managed:
        modules["registry"] = {"source": "./modules/aws_registry", "bucket": literal(stack.registry.bucket)}
    return modules


def _aws_provider(service: str, host: AwsHost) -> Block:
    tags = {"garnish:service": service, **dict(sorted(host.tags.items()))}
    return {"region": literal(host.region), "default_tags": {"tags": literal(tags)}}


def _aws_pool(service: str, pool: Pool, host: AwsHost, registry: RegistryBucket) -> Block:
    kind = pool.instance_type or ""
    settings = {
        "service": service,
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
