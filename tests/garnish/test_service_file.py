"""serverless.yml: what is accepted, and that each mistake names its line, its field and what was expected."""

from __future__ import annotations

from pathlib import Path

import pytest

from adapters.slo import Slo
from adapters.tenants import Limits
from garnish.config import ServiceFile, load_service_file, tenant_names, tenant_of
from garnish.errors import ServiceFileError, StartError
from gateway.prices import Prices

ROOT = Path(__file__).parents[2]
HEAD = "service: s\nbase_model: ./base\n"


def load(folder: Path, text: str, **environment: str) -> ServiceFile:
    file = folder / "serverless.yml"
    file.write_text(text)
    return load_service_file(file, environment)


def test_the_demo_service_file() -> None:
    service = load_service_file(ROOT / "serverless.yml")
    assert service.path(service.base_model) == ROOT / "models" / "SmolLM2-135M-Instruct"
    assert list(service.functions) == ["pirate", "json", "summarize", "support"]
    assert {tenant_of(service, function) for function in service.functions.values()} == {"demo"}
    for function in service.functions.values():
        assert (service.path(function.adapter) / "adapter_config.json").is_file()


def test_everything_that_is_served(tmp_path: Path) -> None:
    service = load(
        tmp_path,
        """
service: support-desk
base_model: org/name
registry: /data/registry
auth: keys
gateway: {host: 0.0.0.0, port: "8081", workers: 1, secret_file: ./secret}
node: {device: cpu, runner: transformers, dtype: bfloat16, adapter_memory: 4GiB, kv_memory: auto, host_memory: 32GiB,
       cpu_workers: auto, cold_start: wait, prefetch: off, prefetch_waste: 0.5, tensor_parallel: 1,
       simulate: {link: 1GB/s, store: 200MB/s, worker_repeats: 7}}
tenants: {acme: {weight: 1}, globex: null}
functions:
  summarize: {tenant: acme, adapter: ./adapters/summarize, alias: prod}
node_pools:
  l40s: {backend: aws, instance_type: g6e.2xlarge, min: 0, desired: 1, max: 8, scale_to_zero_after: 10m}
  here: {backend: local, min: 1, desired: 1, max: 3, scaling: {queue_wait: 250ms, attainment: 0.9, down: 2m}}
infra: {state: s3://acme-terraform/garnish}
""",
    )
    assert (service.gateway.port, service.gateway.host) == (8081, "0.0.0.0")
    assert (service.node.adapter_memory, service.node.kv_memory, service.node.host_memory) == (4 << 30, None, 32 << 30)
    assert (service.node.simulate.link, service.node.simulate.store) == (1e9, 2e8)
    assert service.node.simulate.worker_repeats == 7
    assert (service.node.prefetch, service.node.prefetch_waste) == ("off", 0.5)
    assert service.node_pools["l40s"].scale_to_zero_after == 600
    scaling = service.node_pools["here"].scaling
    assert (scaling.queue_wait, scaling.attainment, scaling.up, scaling.down) == (0.25, 0.9, 15.0, 120.0)
    assert service.path(service.functions["summarize"].adapter) == tmp_path / "adapters" / "summarize"
    assert tenant_names(service) == ("acme", "globex")


def test_a_link_is_simulated_on_a_gpu_too(tmp_path: Path) -> None:
    service = load(tmp_path, HEAD + "node: {device: cuda, simulate: {link: 3.3GB/s, worker_repeats: 2}}\n")
    assert (service.node.device, service.node.simulate.link) == ("cuda", 3.3e9)


def test_the_least_that_is_needed(tmp_path: Path) -> None:
    service = load(tmp_path, HEAD + "functions:\n  f: {adapter: ./a}\ntenants:\n")
    assert tenant_names(service) == ("default",)
    assert tenant_of(service, service.functions["f"]) == "default"


@pytest.mark.parametrize(
    ("text", "line", "field", "told"),
    [
        ("", None, "service", "the key is missing"),
        ("service: s\n", 1, "base_model", "the key is missing"),
        ("- a\n", 1, "", "expected a mapping"),
        (HEAD + "gatway: {}\n", 3, "gatway", "unknown key; did you mean `gateway`?"),
        (HEAD + "gateway:\n  port: 80\n  prt: 1\n", 5, "gateway.prt", "unknown key; did you mean `port`?"),
        (HEAD + "gateway:\n  port: eighty\n", 4, "gateway.port", "expected `int`"),
        (HEAD + "gateway: {port: 70000}\n", 3, "gateway.port", "expected `int` <= 65535"),
        (HEAD + "gateway: [8080]\n", 3, "gateway", "expected `object`, got `array`"),
        (HEAD + "auth: maybe\n", 3, "auth", "invalid enum value 'maybe', expected one of keys, none"),
        (HEAD + "node:\n  eviction: fifo\n", 4, "node.eviction", "expected one of cost, lru, lfu, gdsf"),
        (HEAD + "node:\n  device: tpu\n", 4, "node.device", "expected one of auto, cpu, cuda"),
        (HEAD + "node:\n  adapter_memory: lots\n", 4, "node.adapter_memory", "expected a size such as"),
        (HEAD + "node:\n  simulate:\n    link: 5\n", 5, "node.simulate.link", "expected a rate such as"),
        (HEAD + "node:\n  simulate: {worker_repeats: 0}\n", 4, "node.simulate.worker_repeats", "expected `int` >= 1"),
        (HEAD + "node:\n  simulate: {lnk: 1GB/s}\n", 4, "node.simulate.lnk", "did you mean `link`?"),
        (HEAD + "node: {disk_cache: {pth: x}}\n", 3, "node.disk_cache.pth", "did you mean `path`?"),
        (HEAD + "tenants: {Acme: {}}\n", 3, "tenants.Acme", "expected a name of 1 to 64"),
        (HEAD + "tenants: {a: {limits: {adapter: 5}}}\n", 3, "tenants.a.limits.adapter", "did you mean `adapters`?"),
        (HEAD + "tenants: {a: {limits: {concurrent: 0}}}\n", 3, "tenants.a.limits.concurrent", "expected `int` >= 1"),
        (HEAD + "tenants: {a: {webhook_hosts: [a/b]}}\n", 3, "tenants.a.webhook_hosts", "'a/b' does not appear to be"),
        (HEAD + "tenants: {a: {limits: {bytes: much}}}\n", 3, "tenants.a.limits.bytes", "expected a size such as"),
        (HEAD + "functions:\n  f: {}\n", 4, "functions.f.adapter", "the key is missing"),
        (HEAD + "functions:\n  f:\n    adapter: a\n    aliass: b\n", 6, "functions.f.aliass", "did you mean `alias`?"),
        (HEAD + "functions:\n  f: {adapter: a, tenant: b}\n", 4, "functions.f.tenant", "unknown tenant"),
        (HEAD + "functions:\n  f: {adapter: a, alias: '7'}\n", 4, "functions.f.alias", "not all digits"),
        (
            HEAD + "tenants: {a: , b: }\nfunctions:\n  f: {adapter: a}\n",
            5,
            "functions.f.tenant",
            "expected one of a, b",
        ),
        (HEAD + "node_pools:\n  p: {backend: gcp}\n", 4, "node_pools.p.backend", "expected one of aws, local"),
        (HEAD + "node_pools:\n  p: {backend: aws, min: 3}\n", 4, "node_pools.p", "min <= desired <= max"),
        (
            HEAD + "node_pools:\n  p: {backend: local, min: 1, scale_to_zero_after: 1m}\n",
            4,
            "node_pools.p.scale_to_zero_after",
            "min is 1: expected 0",
        ),
        (HEAD + "node_pools:\n  p: {backend: local, scaling: {up: x}}\n", 4, "node_pools.p.scaling.up", "a duration"),
        (
            HEAD + "node_pools:\n  p: {backend: local, scaling: {utilisation: 0}}\n",
            4,
            "node_pools.p.scaling.utilisation",
            "> 0",
        ),
    ],
)
def test_mistakes(tmp_path: Path, text: str, line: int | None, field: str, told: str) -> None:
    with pytest.raises(ServiceFileError) as refused:
        load(tmp_path, text)
    assert (refused.value.field, refused.value.line) == (field, line)
    assert told in refused.value.problem
    assert str(refused.value).startswith(f"{tmp_path / 'serverless.yml'}:{line}: " if line else str(tmp_path))


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    assert load(tmp_path, "\ufeff" + HEAD).service == "s"


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("infra.state", "infra: {state: 's3:/bucket/x'}"),
        ("infra.state", "infra: {state: 'gs://bucket/x'}"),
        ("functions.f.adapter", "functions: {f: {adapter: 's3:/bucket/x'}}"),
    ],
)
def test_what_begins_like_an_address_is_no_path(tmp_path: Path, field: str, text: str) -> None:
    with pytest.raises(ServiceFileError, match=r"begins like an address.*expected a directory's path or ") as refused:
        load(tmp_path, HEAD + text)
    assert (refused.value.field, refused.value.line) == (field, 3)
    service = load(tmp_path, "service: s\nbase_model: hf:org/name\nnode: {disk_cache: {path: 's3:/x'}}")
    for written in (service.base_model, "s3:/x"):
        with pytest.raises(StartError, match="begins like an address"):
            service.path(written)
    assert service.path("./a:b") == tmp_path / "a:b"


@pytest.mark.parametrize(
    ("registry", "told"),
    [
        ("s3://bucket/a b", "prefix"),
        ("s3://B", "not the name of an S3 bucket"),
        ("http://host/x", "expected a directory"),
        ("s3:/bucket/x", "expected a directory's path, a file:// URL or s3://bucket/prefix"),
        ("gs:bucket", "expected a directory"),
        ("file:/data", "expected a directory"),
    ],
)
def test_registries_that_can_not_be(tmp_path: Path, registry: str, told: str) -> None:
    with pytest.raises(ServiceFileError, match=told) as refused:
        load(tmp_path, HEAD + f"registry: {registry}")
    assert (refused.value.field, refused.value.line) == ("registry", 3)


def test_origins_are_those_that_browsers_send(tmp_path: Path) -> None:
    service = load(tmp_path, HEAD + "gateway: {cors_origins: ['https://app.example', '*']}")
    assert service.gateway.cors_origins == ["https://app.example", "*"]
    for odd in ("app.example", "https://app.example/"):
        with pytest.raises(ServiceFileError) as refused:
            load(tmp_path, HEAD + f"gateway: {{cors_origins: ['{odd}']}}")
        assert (refused.value.field, refused.value.line) == ("gateway.cors_origins", 3)


def test_sources_are_places_in_s3_or_folders(tmp_path: Path) -> None:
    service = load(tmp_path, HEAD + "gateway: {allowed_sources: ['s3://acme-training/', 'file:///runs/new']}")
    assert service.gateway.allowed_sources == ["s3://acme-training/", "file:///runs/new"]
    for odd in ("file:///", "file://runs", "file:///runs/../x", "s3://acme-training/../x", "./adapters"):
        with pytest.raises(ServiceFileError) as refused:
            load(tmp_path, HEAD + f"gateway: {{allowed_sources: ['{odd}']}}")
        assert (refused.value.field, refused.value.line) == ("gateway.allowed_sources", 3)


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("gateway.policy", "gateway: {policy: best}"),
        ("gateway.predictor", "gateway: {predictor: arima}"),
        ("node.runner", "node: {runner: vllm}"),
        ("node.tensor_parallel", "node: {tensor_parallel: 2}"),
    ],
)
def test_what_is_not_built_is_refused(tmp_path: Path, field: str, text: str) -> None:
    """Accepted and ignored would be worse."""
    with pytest.raises(ServiceFileError, match="not built yet") as refused:
        load(tmp_path, HEAD + text)
    assert (refused.value.field, refused.value.line) == (field, 3)


@pytest.mark.parametrize("text", ["prefetch: lstm", "prefetch_waste: 1.5", "prefetch_waste: -0.1"])
def test_how_prefetching_can_not_be_set(tmp_path: Path, text: str) -> None:
    with pytest.raises(ServiceFileError) as refused:
        load(tmp_path, HEAD + f"node: {{{text}}}")
    assert refused.value.field == f"node.{text.partition(':')[0]}"


@pytest.mark.parametrize(
    "text", ["lora_kernel: sgmv", "max_rows: 0", "max_rows: 5000", "chunk_tokens: 8", "max_cold: 0", "max_rows: many"]
)
def test_how_passes_can_not_be_set(tmp_path: Path, text: str) -> None:
    with pytest.raises(ServiceFileError) as refused:
        load(tmp_path, HEAD + f"node: {{{text}}}")
    assert refused.value.field == f"node.{text.partition(':')[0]}"


def test_limits_that_are_enforced(tmp_path: Path) -> None:
    written = "{adapters: 5, bytes: 2GiB, concurrent: 8, rps: 0.5, tokens_per_minute: 5000}"
    service = load(tmp_path, HEAD + f"tenants: {{a: {{limits: {written}}}, b: }}")
    limits = Limits(adapters=5, bytes=2 << 30, concurrent=8, rps=0.5, tokens_per_minute=5000)
    assert service.tenants["a"].limits == limits
    assert service.tenants["b"].limits is None


def test_workers_share_a_redis(tmp_path: Path) -> None:
    shared = "redis://:word@127.0.0.1:6379/0"
    service = load(tmp_path, HEAD + f"gateway: {{workers: 2, redis: '{shared}', node_hosts: [nodes.example]}}")
    assert (service.gateway.workers, service.gateway.redis, service.gateway.node_hosts) == (
        2,
        shared,
        ["nodes.example"],
    )
    for text, field in [
        ("{workers: 2}", "gateway.workers"),
        ("{workers: 2, redis: 'http://:word@h'}", "gateway.redis"),
        ("{redis: 'redis://:word@h:port'}", "gateway.redis"),
        ("{workers: 33, redis: 'redis://h'}", "gateway.workers"),
    ]:
        with pytest.raises(ServiceFileError) as refused:
            load(tmp_path, HEAD + f"gateway: {text}")
        assert (refused.value.field, refused.value.line) == (field, 3)
        assert "word" not in str(refused.value)


def test_weights_and_slos(tmp_path: Path) -> None:
    slo = "{ttft_ms: 500, tpot_ms: 60, attain: 0.95, class: strict}"
    service = load(
        tmp_path, HEAD + f"tenants: {{a: {{weight: 2, slo: {slo}}}, b: {{slo: {{class: best_effort}}}}, c: }}"
    )
    assert (service.tenants["a"].weight, service.tenants["a"].slo) == (2.0, Slo(500, 60, 0.95, "strict"))
    assert service.tenants["b"].slo == Slo(slo_class="best_effort")
    assert (service.tenants["c"].weight, service.tenants["c"].slo) == (None, None)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weight", "{weight: 0}"),
        ("weight", "{weight: .inf}"),
        ("weight", "{weight: .nan}"),
        ("slo.ttft_ms", "{slo: {ttft_ms: 0}}"),
        ("slo.ttft_ms", "{slo: {ttft_ms: .inf}}"),
        ("slo.attain", "{slo: {attain: 1.5}}"),
        ("slo.class", "{slo: {class: gold}}"),
        ("slo.clas", "{slo: {clas: strict}}"),
    ],
)
def test_weights_and_slos_that_mean_nothing(tmp_path: Path, field: str, value: str) -> None:
    with pytest.raises(ServiceFileError) as refused:
        load(tmp_path, HEAD + f"tenants: {{acme: {value}}}")
    assert (refused.value.field, refused.value.line) == (f"tenants.acme.{field}", 3)


def test_environment_gives_any_kind_of_value(tmp_path: Path) -> None:
    text = HEAD + "gateway:\n  port: ${env:PORT}\nnode:\n  adapter_memory: ${env:MEMORY}\n"
    service = load(tmp_path, text, PORT="9000", MEMORY="64MiB")
    assert (service.gateway.port, service.node.adapter_memory) == (9000, 64 << 20)


def test_the_files_in_the_documentation(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "guide" / "serverless-yml.md").read_text()
    examples = [block.partition("```")[0] for block in page.split("```yaml\n")[1:]]
    assert [load(tmp_path, example).service for example in examples] == ["demo", "support-desk"]


def test_a_function_s_policy_stands_beside_its_own_keys(tmp_path: Path) -> None:
    service = load(
        tmp_path,
        HEAD + "functions:\n  f: {adapter: a, alias: prod, provisioned: {device: 1, host: 2}, idle_ttl: 15m,"
        "\n    timeout: 30s, max_age: 2h, reserved_concurrency: 2, max_concurrency: 8, retries: 1, slo_class: strict,"
        "\n    prefetch: off,"
        "\n    defaults: {temperature: 0}, warm: [{cron: '45 8 * * 1-5', for: 60m, copies: 2}]}\n  g: {adapter: a}",
    )
    assert service.functions["f"].policy() == {
        "provisioned": {"device": 1, "host": 2}, "idle_ttl": 900, "timeout": 30, "max_age": 7200,
        "reserved_concurrency": 2, "max_concurrency": 8, "retries": 1, "slo_class": "strict",
        "defaults": {"temperature": 0}, "warm": [{"cron": "45 8 * * 1-5", "for": 3600, "copies": 2}],
        "prefetch": "off",
    }  # fmt: skip
    assert isinstance(service.functions["f"].policy()["warm"][0]["for"], int), "a gateway takes no other number"
    assert service.functions["g"].policy() == {}


@pytest.mark.parametrize(
    ("written", "field"),
    [
        ("provisioned: 0", "provisioned"),
        ("provisioned: 1", "provisioned"),
        ("provisioned: {disk: 1}", "provisioned.disk"),
        ("idle_ttl: soon", "idle_ttl"),
        ("warm: [{cron: '0 99 * * *', for: 60}]", "warm"),
        ("warm: [{cron: '0 9 * * *', for: soon}]", "warm.0.for"),
        ("warm: [{cron: '0 9 * * *', for: 90500ms}]", "warm.0.for"),
        ("reserved_concurrency: 3, max_concurrency: 2", "reserved_concurrency"),
        ("on_failure: {}", "on_failure"),
        ("prefetch: never", "prefetch"),
    ],
)
def test_a_policy_that_would_be_refused_is_refused_here(tmp_path: Path, written: str, field: str) -> None:
    with pytest.raises(ServiceFileError) as refused:
        load(tmp_path, HEAD + f"functions: {{f: {{adapter: a, {written}}}}}")
    assert (refused.value.field, refused.value.line) == (f"functions.f.{field}", 3)


def test_prices_are_numbers(tmp_path: Path) -> None:
    service = load(tmp_path, HEAD + "prices: {input_tokens_1m: 0.2, adapter_gb_hour: 1}")
    assert service.prices == Prices(input_tokens_1m=0.2, adapter_gb_hour=1)
    with pytest.raises(ServiceFileError) as refused:
        load(tmp_path, HEAD + "prices: {input_tokens: 0.2}")
    assert refused.value.field == "prices.input_tokens"
