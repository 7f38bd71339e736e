"""Builds the `Stack` of node pools from serverless.yml. `infra` renders it for Terraform."""

from __future__ import annotations

import hashlib
import sys
from importlib.metadata import version
from pathlib import Path

import msgspec

from adapters.errors import InvalidRequest
from adapters.s3_url import S3Place, parse_s3_url
from garnish.config import ServiceFile
from garnish.credentials import FILE_NAME, read_credentials
from garnish.errors import ServiceFileError
from garnish.service_file import NodePool
from garnish.settings import registry_of, secret_file_of
from garnish.up.prepare import local_url
from infra.autoscale.sizes import SetSize, effective_size, read_sizes
from infra.processes import service_directory
from infra.stack import AwsHost, LocalHost, Pool, RegistryBucket, Stack, sharing_nodes

PROGRAM = (sys.executable, "-P", "-m", "garnish.pool_node")
REMOTE_MODEL = "/var/lib/garnish-data/model"
"""Folder for base models on an AWS instance. The instance's user data copies the model to a subfolder of its name."""


def stack_of(service: ServiceFile, state: Path) -> Stack:
    """Returns the service file's node pools as a Stack, with the sizes that the autoscaler has set.

    `state` is the state directory, an absolute path. Raises FrontDoorError.
    """
    sizes = read_sizes(infra_directory(service, state))
    return Stack(
        service=service.service,
        pools=tuple(_pool(name, pool, sizes.get(name)) for name, pool in service.node_pools.items()),
        local=_local_host(service, state),
        aws=_aws_host(service, state),
        registry=_registry_bucket(service),
        state=_s3_state(service),
    )


def host_nodes_of(service: ServiceFile, node: str) -> int:
    """Returns the number of nodes among which this host's cores are divided, including the node with the id `node`.

    It is 1 if the id is not that of a node of a local pool.
    """
    bounds = {name: pool.max for name, pool in service.node_pools.items() if pool.backend == "local"}
    pool, _, number = node.rpartition("-")
    return sharing_nodes(bounds.values()) if pool in bounds and number.isdecimal() else 1


def _pool(name: str, pool: NodePool, size: SetSize | None) -> Pool:
    desired = effective_size(size, pool.desired, pool.min, pool.max)
    return Pool(
        name=name,
        backend=pool.backend,
        min=pool.min,
        desired=desired,
        stated=None if desired == pool.desired else pool.desired,
        max=pool.max,
        instance_type=pool.instance_type,
    )


def infra_directory(service: ServiceFile, state: Path) -> Path:
    """Returns the folder on this host that contains the Terraform root modules for the service file's state."""
    written = service.infra.state
    if written is None or written.startswith("s3://"):
        return service_directory(state, service.service)
    return service.path(written) / service.service


def gateway_url_of(service: ServiceFile, state: Path) -> str:
    """Returns the gateway's URL for nodes on this host.

    It is `infra.gateway_url` of the service file, else the URL in the state's credentials, else the URL of the file's
    `gateway` section.
    """
    if service.infra.gateway_url is not None:
        return service.infra.gateway_url
    credentials = read_credentials(state / FILE_NAME)
    return credentials.url if credentials is not None else local_url(service.gateway.host, service.gateway.port)


def _local_host(service: ServiceFile, state: Path) -> LocalHost:
    return LocalHost(
        program=PROGRAM,
        service_file=str(service.file.absolute()),
        state=str(state),
        gateway_url=gateway_url_of(service, state),
        secret_file=str(secret_file_of(service, state).absolute()),
        registry=registry_of(service, state),
        revision=_revision(service),
    )


def _aws_host(service: ServiceFile, state: Path) -> AwsHost | None:
    """Returns the settings of the `aws` backend, or None if the file has no infra.aws.

    They are also returned if there are no pools in AWS, so that the registry's bucket is not destroyed. Raises
    ServiceFileError if a key is missing that nodes in AWS need.
    """
    aws = service.infra.aws
    if aws is None:
        return None
    if service.infra.gateway_url is None:
        raise ServiceFileError(service.file, None, "infra.gateway_url", "nodes in AWS need the gateway's address")
    if service.registry is None or not service.registry.startswith("s3://"):
        raise ServiceFileError(service.file, None, "registry", "nodes in AWS need a registry on S3, s3://bucket/prefix")
    return AwsHost(
        **msgspec.structs.asdict(aws),
        gateway_url=service.infra.gateway_url,
        node_file=node_file(service, state),
        devices=None if service.node.devices == "all" else service.node.devices,
    )


def node_file(service: ServiceFile, state: Path) -> str:
    """Returns the service file for nodes in AWS, as JSON, without tenants, functions and secrets.

    Raises ServiceFileError if `node.simulate` is set.
    """
    node = msgspec.to_builtins(service.node)
    simulate = {name: value for name, value in node.pop("simulate").items() if value not in (None, 1)}
    stated = {name: value for name, value in node.items() if value is not None}
    if simulate:
        raise ServiceFileError(
            service.file, None, "node.simulate", "it is for measurement on this host, not for nodes in AWS; remove it"
        )
    source = service.infra.aws.model_source if service.infra.aws is not None else service.base_model
    model = f"{REMOTE_MODEL}/{Path(source).name}"
    read = {"service": service.service, "base_model": model, "registry": registry_of(service, state), "node": stated}
    return msgspec.json.encode(read, order="sorted").decode()


def _registry_bucket(service: ServiceFile) -> RegistryBucket | None:
    if service.registry is None or not service.registry.startswith("s3://"):
        return None
    place = _s3_place(service, "registry", service.registry)
    managed = service.infra.aws is not None and service.infra.aws.registry_bucket == "managed"
    return RegistryBucket(bucket=place.bucket, prefix=place.prefix, managed=managed)


def _revision(service: ServiceFile) -> str:
    """Returns a digest of the settings that a node reads from the file, and of Garnish's version: 16 hex digits."""
    base = service.path(service.base_model)
    read = [service.node, str(base) if base.exists() else service.base_model, version("garnish")]
    return hashlib.sha256(msgspec.json.encode(read)).hexdigest()[:16]


def _s3_state(service: ServiceFile) -> S3Place | None:
    written = service.infra.state or ""
    if not written.startswith("s3://"):
        if "://" in written:
            raise ServiceFileError(
                service.file, None, "infra.state", "expected a directory's path or s3://bucket/prefix"
            )
        return None
    return _s3_place(service, "infra.state", written)


def _s3_place(service: ServiceFile, field: str, url: str) -> S3Place:
    try:
        return parse_s3_url(url)
    except InvalidRequest as error:
        raise ServiceFileError(service.file, None, field, str(error)) from None
