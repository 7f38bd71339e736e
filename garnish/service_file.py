"""Types of the sections of serverless.yml.

After reading, sizes are in bytes, rates in bytes per second and times in seconds.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from adapters.functions import SUPPORTED_POLICY, Policy
from adapters.slo import Slo, Weight
from adapters.tenants import MAX_WEBHOOK_HOSTS, FileBytes, Limits, WebhookHost
from gateway.prices import Prices
from infra.stack import Aws, Text

Port = Annotated[int, Meta(ge=1, le=65535)]
Count = Annotated[int, Meta(ge=0, le=10_000)]


class Gateway(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    host: Text = "127.0.0.1"
    port: Port = 8080
    workers: Annotated[int, Meta(ge=1, le=32)] = 1
    webhook_hosts: list[Text] | None = None
    secret_file: Text | None = None
    credentials_file: Text | None = None
    redis: Text | None = None
    node_hosts: list[Text] | None = None
    allowed_sources: list[Text] | None = None
    cors_origins: list[Text] | None = None
    policy: Text = "rank_aware"
    predictor: Text = "mix"
    hold: float | None = None


class Simulate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    link: float | None = None
    store: float | None = None
    worker_repeats: Annotated[int, Meta(ge=1, le=10_000)] = 1


MAX_GPUS = 64
Devices = Annotated[list[Annotated[int, Meta(ge=0, lt=MAX_GPUS)]], Meta(min_length=1, max_length=MAX_GPUS)]


class DiskCache(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    path: Text | None = None
    bytes: int | None = None


class Node(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    engine: Literal["garnish", "vllm"] = "garnish"
    vllm: dict[str, Any] = {}
    device: Literal["auto", "cpu", "cuda"] = "auto"
    devices: Literal["all"] | Devices = "all"
    runner: Text = "auto"
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    lora_kernel: Literal["auto", "mbgmv", "bgmv"] = "auto"
    max_rows: Annotated[int, Meta(ge=1, le=1024)] | None = None
    max_cold: Annotated[int, Meta(ge=1, le=64)] | None = None
    chunk_tokens: Annotated[int, Meta(ge=16, le=65_536)] | None = None
    adapter_memory: int | None = None
    kv_memory: int | None = None
    prefix_cache: Literal["off", "auto"] = "auto"
    host_memory: int | None = None
    cpu_workers: Count | Literal["auto"] = "auto"
    cold_start: Literal["auto", "wait", "pipeline", "assist"] = "auto"
    eviction: Literal["cost", "lru", "lfu", "gdsf"] = "cost"
    prefetch: Literal["off", "auto"] = "auto"
    prefetch_waste: Annotated[float, Meta(ge=0, le=1)] = 0.25
    tensor_parallel: Annotated[int, Meta(ge=1)] = 1
    disk_cache: DiskCache | Literal["off"] | None = None
    simulate: Simulate = Simulate()


class Tenant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    weight: Weight | None = None
    slo: Slo | None = None
    limits: Limits | None = None
    webhook_hosts: Annotated[list[WebhookHost], Meta(max_length=MAX_WEBHOOK_HOSTS)] | None = None
    file_bytes: FileBytes | None = None


class Function(Policy, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A function; the fields of its policy are on the same level."""

    adapter: Text
    tenant: Text | None = None
    alias: Text | None = None

    def policy(self) -> dict[str, Any]:
        """Returns the policy fields that the file states."""
        return {name: value for name, value in msgspec.to_builtins(self).items() if name in SUPPORTED_POLICY}


class Scaling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    queue_wait: float = 1.0
    attainment: Annotated[float, Meta(ge=0, le=1)] = 0.99
    utilisation: Annotated[float, Meta(gt=0, le=1)] = 0.7
    up: float = 15.0
    down: float = 300.0


class NodePool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    backend: Literal["aws", "local"]
    instance_type: Text | None = None
    min: Count = 0
    desired: Count = 1
    max: Count = 1
    scale_to_zero_after: float | None = None
    scaling: Scaling = Scaling()


WHEEL_URL = r"s3://[a-z0-9][a-z0-9.-]+/[A-Za-z0-9._/+-]+\.whl"
"""Pattern of `infra.aws.package`, which the module aws_pool checks too."""


class Infra(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    state: Text | None = None
    gateway_url: Text | None = None
    aws: Aws | None = None


class Top(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Top-level keys; sections are checked one by one, so that errors name their line."""

    service: Text
    base_model: Text
    registry: Text | None = None
    auth: Literal["keys", "none"] = "keys"
    gateway: dict[str, Any] = {}
    node: dict[str, Any] = {}
    tenants: dict[str, Any] = {}
    functions: dict[str, Any] = {}
    node_pools: dict[str, Any] = {}
    infra: dict[str, Any] = {}
    prices: Prices | None = None
