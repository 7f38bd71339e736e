"""Settings of the gateway. `garnish` fills them from serverless.yml and the command line; parts take what they use."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Literal

import msgspec

from adapters.errors import InvalidRequest
from adapters.s3_url import parse_s3_url
from cluster.news import RECORD_EXPIRY
from cluster.redis_url import url_problem
from gateway.prices import Prices
from gateway.webhook_hosts import parse_webhook_hosts

MAX_TIMEOUT = 3600.0
"""Seconds: the longest call."""
MAX_WORKERS = 32
"""Most worker processes, so that all, old and new in a reload, find a slot in the journal of usage."""
POSITIVE = (
    "call_body",
    "deploy_body",
    "max_concurrent",
    "max_uploads",
    "max_tenant_uploads",
    "max_deploys",
    "max_tenant_deploys",
    "deploy_wait",
    "request_timeout",
    "shutdown_seconds",
)
"""Settings that must be above 0."""


class ConfigError(ValueError):
    """A setting, or two settings together, that the gateway can't serve with; names the field."""


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Times are in seconds, sizes in bytes."""

    model_dir: str
    """Directory of the base model: tokenizer and config are read, weights are only fingerprinted."""
    base_id: str
    registry: str
    """Directory (or URL) of the object store."""
    secret_file: str
    """The cluster secret, shared with the nodes."""
    tmp_dir: str
    """Uploads lie here while they are checked; emptied at start."""
    usage_dir: str = ""
    """The journal of usage, which must outlive the process; default: `usage` next to `tmp_dir`."""
    host: str = "127.0.0.1"
    port: int = 8080
    workers: int = 1
    """Processes. More than one share what they know through `redis`."""
    redis: str | None = None
    """URL of the Redis that holds the cluster state; None: it is in the memory of the only worker. May hold a password:
    only `shown_url` of it may be shown."""
    node_hosts: tuple[str, ...] = ()
    """Hosts that nodes may name in their URLs although they report from another address."""
    auth: Literal["keys", "none"] = "keys"
    policy: str = "rank_aware"
    """Routing policy: one of gateway.scheduling.policy.POLICIES."""
    predictor: str = "mix"
    """Forecaster of calls: one of gateway.residency.remote_trainer.CHOICES."""
    allowed_sources: tuple[str, ...] = ()
    """`s3://bucket/prefix`es from below which tenants may deploy."""
    prices: Prices | None = None
    """Prices of `GET /usage`; None: it shows none."""
    webhook_hosts: tuple[str, ...] = ()
    """Hosts that webhooks may go to (`*.domain`: all below it), and networks that may be private; empty: none."""

    call_body: int = 1 << 20
    deploy_body: int = 512 << 20
    body_seconds: float = 30.0
    """Seconds within which the whole body of a call must have arrived."""
    deploy_seconds: float = 600.0
    """Seconds within which the whole body of a deploy must have arrived."""
    body_idle_seconds: float = 20.0
    """Longest pause inside any body."""
    max_concurrent: int = 4096
    """Requests in the gateway at once; more are answered 429."""
    max_uploads: int = 16
    """Deploys at once, each of which may fill `deploy_body` bytes of disk; more are answered 429."""
    max_tenant_uploads: int = 4
    max_deploys: int = 4
    """Uploads that are checked and stored at once; more wait, at most `deploy_wait`."""
    max_tenant_deploys: int = 2
    deploy_wait: float = 60.0

    request_timeout: float = 600.0
    """Deadline of a call that states no `timeout`."""
    max_timeout: float = MAX_TIMEOUT
    hold_seconds: float = 60.0
    """Seconds for which a call that finds no node waits for one, while there is an autoscaler; 0: it is answered at
    once."""
    connect_seconds: float = 2.0
    """Timeout of connecting to a node."""
    node_silence: float = 10.0
    """A node without record for this long is taken for dead: its open requests fail, even if their connections live."""
    record_expiry: float = RECORD_EXPIRY
    """A node without record for this long gets no new requests."""
    header_seconds: float = 10.0
    """A stream's headers go out with the first token, or after this long."""
    keepalive_seconds: float = 15.0
    store_seconds: float = 10.0
    """Longest wait for one read of the registry."""
    cache_seconds: float = 1.0
    grace_seconds: float = 60.0
    """Seconds for which cached records stay valid while the store is away."""
    shutdown_seconds: float = MAX_TIMEOUT + 10.0
    """Seconds for which open requests may continue after TERM, before they are ended with an error. By default the
    longest ends."""


def check_config(config: GatewayConfig) -> None:
    """Raises ConfigError for what the types can't say."""
    if not 1 <= config.workers <= MAX_WORKERS:
        raise ConfigError(f"workers: must be 1 to {MAX_WORKERS}, not {config.workers}")
    if config.workers > 1 and config.redis is None:
        raise ConfigError(f"workers: {config.workers} need `redis`, which holds what they share; without it there is 1")
    if config.redis is not None and (problem := url_problem(config.redis)):
        raise ConfigError(f"redis: {problem}")
    if config.auth == "none" and not is_loopback(config.host):
        raise ConfigError(f"auth: `none` is accepted on a loopback address only, and host is {config.host!r}")
    try:
        for source in config.allowed_sources:
            parse_s3_url(source)
    except InvalidRequest as error:
        raise ConfigError(f"allowed_sources: {error}") from None
    try:
        parse_webhook_hosts(config.webhook_hosts)
    except ValueError as error:
        raise ConfigError(f"webhook_hosts: {error}") from None
    for name in POSITIVE:
        if getattr(config, name) <= 0:
            raise ConfigError(f"{name}: must be above 0, not {getattr(config, name)}")
    if not 0 <= config.hold_seconds <= config.max_timeout:
        raise ConfigError(f"hold_seconds: must be 0 to max_timeout {config.max_timeout}, not {config.hold_seconds}")
    if config.request_timeout > config.max_timeout:
        raise ConfigError(f"request_timeout: {config.request_timeout} is above max_timeout {config.max_timeout}")


def share(limit: int, config: GatewayConfig) -> int:
    """Returns one worker's share, at least 1, of a limit on what the whole gateway holds at once."""
    return max(1, limit // config.workers)


def usage_directory(config: GatewayConfig) -> Path:
    return Path(config.usage_dir) if config.usage_dir else Path(config.tmp_dir).absolute().with_name("usage")


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
