"""Settings of the gateway. `garnish` reads them from serverless.yml and the command line."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Literal

import msgspec

from adapters.errors import InvalidRequest
from adapters.peft_config import MAX_RANK
from adapters.sources import check_source
from cluster.news import RECORD_EXPIRY
from cluster.redis_url import url_problem
from gateway.origins import check_origins
from gateway.prices import Prices
from gateway.webhook_hosts import parse_webhook_hosts

MAX_TIMEOUT = 3600.0
"""Maximum timeout of a call in seconds."""
MAX_WORKERS = 32
"""Maximum worker processes. During a reload, old and new workers together need slots in the usage journal."""
MUST_BE_POSITIVE = (
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


class ConfigError(ValueError):
    """A setting, or a combination of settings, is invalid; the message names the field."""


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the gateway. Times are in seconds, sizes in bytes."""

    model_dir: str
    """Directory of the base model. Tokenizer and config are read; weights are only fingerprinted."""
    base_id: str
    registry: str
    secret_file: str
    tmp_dir: str
    """Directory of uploads while they are checked. It is cleared when the gateway starts."""
    usage_dir: str = ""
    """Directory of the usage journal, which must outlive the process. If empty, it is the directory `usage` next to
    `tmp_dir`."""
    host: str = "127.0.0.1"
    port: int = 8080
    max_lora_rank: int = MAX_RANK
    """Maximum rank of adapters while no node has reported a limit."""
    waits_for_base: bool = False
    """True: if the registry has no manifest of the base model, the gateway waits for a node's before it starts."""
    workers: int = 1
    """Number of worker processes. More than one need `redis` to share state."""
    redis: str | None = None
    """URL of the Redis with the cluster state; None if the state is in the memory of the single worker.

    The URL may contain a password, so only its `shown_url` may be displayed.
    """
    node_hosts: tuple[str, ...] = ()
    """Hosts that nodes may use in their URLs even if they report from another address."""
    auth: Literal["keys", "none"] = "keys"
    policy: str = "rank_aware"
    predictor: str = "mix"
    allowed_sources: tuple[str, ...] = ()
    """Places from which tenants may deploy: prefixes (`s3://bucket/prefix`) and folders of this host
    (`file:///folder`)."""
    prices: Prices | None = None
    webhook_hosts: tuple[str, ...] = ()
    """Allowed hosts of webhooks (`*.domain` means all subdomains) and networks, which may be private. Empty if no
    webhook is allowed."""

    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may call the gateway from a browser; `*` allows all. Empty if none may."""

    call_body: int = 1 << 20
    deploy_body: int = 512 << 20
    body_seconds: float = 30.0
    """Maximum seconds until the complete body of a call has arrived."""
    deploy_seconds: float = 600.0
    body_idle_seconds: float = 20.0
    max_concurrent: int = 4096
    max_uploads: int = 16
    """Maximum concurrent deploys, each of which may use `deploy_body` bytes of disk; further ones get status 429."""
    max_tenant_uploads: int = 4
    max_deploys: int = 8
    """Maximum uploads that are checked and stored at once. Further uploads wait, at most `deploy_wait` seconds."""
    max_tenant_deploys: int = 2
    deploy_wait: float = 60.0

    request_timeout: float = 600.0
    max_timeout: float = MAX_TIMEOUT
    hold_seconds: float = 60.0
    """Seconds for which a call waits for a node if none runs and an autoscaler is active. 0 means that such a call is
    refused at once."""
    connect_seconds: float = 2.0
    node_silence: float = 10.0
    """Seconds without a record after which a node is taken for dead. Its open requests fail, even if their connections
    are alive."""
    record_expiry: float = RECORD_EXPIRY
    """Seconds without a record after which a node gets no new requests."""
    header_seconds: float = 10.0
    """Seconds from the start of a stream until its headers are sent without waiting longer for the first token."""
    keepalive_seconds: float = 15.0
    store_seconds: float = 10.0
    cache_seconds: float = 1.0
    grace_seconds: float = 60.0
    """Seconds for which cached records stay valid while the store is unavailable."""
    shutdown_seconds: float = MAX_TIMEOUT + 10.0
    """Seconds for which open requests may continue after SIGTERM. Requests that are still open then end with an error.
    The default covers the longest call."""


def check_config(config: GatewayConfig) -> None:
    """Checks the ranges of settings and their combinations. Raises ConfigError."""
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
            check_source(source)
    except InvalidRequest as error:
        raise ConfigError(f"allowed_sources: {error}") from None
    try:
        parse_webhook_hosts(config.webhook_hosts)
    except ValueError as error:
        raise ConfigError(f"webhook_hosts: {error}") from None
    try:
        check_origins(config.cors_origins, has_keys=config.auth == "keys")
    except ValueError as error:
        raise ConfigError(f"cors_origins: {error}") from None
    for name in MUST_BE_POSITIVE:
        if getattr(config, name) <= 0:
            raise ConfigError(f"{name}: must be above 0, not {getattr(config, name)}")
    if not 0 <= config.hold_seconds <= config.max_timeout:
        raise ConfigError(f"hold_seconds: must be 0 to max_timeout {config.max_timeout}, not {config.hold_seconds}")
    if config.request_timeout > config.max_timeout:
        raise ConfigError(f"request_timeout: {config.request_timeout} is above max_timeout {config.max_timeout}")


def share(limit: int, config: GatewayConfig) -> int:
    """Returns one worker's share of a limit that holds for the whole gateway; at least 1."""
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
