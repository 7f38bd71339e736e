"""From serverless.yml to the stack of node pools that `infra` renders."""

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
from garnish.settings import registry_of, secret_file_of
from garnish.up.prepare import local_url
from infra.stack import LocalHost, Pool, S3State, Stack

PROGRAM = (sys.executable, "-P", "-m", "garnish.pool_node")


def stack_of(service: ServiceFile, state: Path) -> Stack:
    """`state` is absolute. Raises FrontDoorError."""
    return Stack(
        service=service.service,
        pools=tuple(
            Pool(
                name=name,
                backend=pool.backend,
                min=pool.min,
                desired=pool.desired,
                max=pool.max,
                instance_type=pool.instance_type,
                scale_to_zero_after=pool.scale_to_zero_after,
            )
            for name, pool in service.node_pools.items()
        ),
        local=_local_host(service, state),
        state=_s3_state(service),
    )


def infra_directory(service: ServiceFile, state: Path) -> Path:
    """Where the root modules of this service file's state are kept on this host."""
    written = service.infra.state
    if written is None or written.startswith("s3://"):
        return state / "infra" / service.service
    return service.path(written) / service.service


def gateway_url_of(service: ServiceFile, state: Path) -> str:
    """What nodes of this host report to: as the file says, else where the gateway of this state listens."""
    if service.infra.gateway_url is not None:
        return service.infra.gateway_url
    known = read_credentials(state / FILE_NAME)
    return known.url if known is not None else local_url(service.gateway.host, service.gateway.port)


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


def _revision(service: ServiceFile) -> str:
    """Of what a node reads from the file, and of the program that it runs."""
    base = service.path(service.base_model)
    read = [service.node, str(base) if base.exists() else service.base_model, version("garnish")]
    return hashlib.sha256(msgspec.json.encode(read)).hexdigest()[:16]


def _s3_state(service: ServiceFile) -> S3State | None:
    written = service.infra.state or ""
    if not written.startswith("s3://"):
        if "://" in written:
            raise ServiceFileError(
                service.file, None, "infra.state", "expected a directory's path or s3://bucket/prefix"
            )
        return None
    place = _s3_place(service, "infra.state", written)
    return S3State(place.bucket, place.prefix)


def _s3_place(service: ServiceFile, field: str, url: str) -> S3Place:
    try:
        return parse_s3_url(url)
    except InvalidRequest as error:
        raise ServiceFileError(service.file, None, field, str(error)) from None
