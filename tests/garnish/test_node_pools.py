"""From serverless.yml to node pools, and `garnish infra` where it needs neither terraform nor nodes."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from adapters.base_manifest import MANIFEST_VERSION, BaseManifest, InspectedBase, store_manifest
from adapters.local_store import LocalStore
from adapters.modules import LINEAR, Module
from garnish.cli.main import app
from garnish.config import load_service_file
from garnish.errors import FrontDoorError
from garnish.node_pools import (
    gateway_url_of,
    host_nodes_of,
    infra_directory,
    node_file,
    stack_of,
)
from garnish.pool_memory import check_memory
from garnish.provision import check_credentials
from infra.errors import InfraError
from infra.render import render

AWS = {
    "region": "eu-central-1", "vpc_id": "vpc-1", "subnet_ids": ["subnet-1"], "gateway_security_group_id": "sg-1",
    "secret_parameter": "/garnish/secret", "package": "s3://acme/garnish.whl", "image_parameter": "/images/gpu",
    "model_source": "s3://acme-models/llama-8b",
}  # fmt: skip
LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA_8B))
    return tmp_path


def write(folder: Path, **changes: Any) -> Path:
    pools = {"here": {"backend": "local", "max": 3}}
    written = {"service": "demo", "base_model": "./model", "node_pools": pools, **changes}
    (folder / "serverless.yml").write_text(json.dumps(written))
    return folder / "serverless.yml"


def aws_file(folder: Path, **changes: Any) -> Path:
    given: dict[str, Any] = {
        "registry": "s3://acme-adapters/prod",
        "tenants": {"acme": {}},
        "node": {"device": "cuda", "adapter_memory": "4GiB"},
        "node_pools": {"l40s": {"backend": "aws", "instance_type": "g6e.2xlarge", "max": 8}},
        "infra": {"gateway_url": "http://gateway:8080", "aws": AWS},
    }
    return write(folder, **{**given, **changes})


def test_a_local_pool(folder: Path) -> None:
    made = stack_of(load_service_file(write(folder)), folder / "state")
    assert [(pool.name, pool.min, pool.desired, pool.max) for pool in made.pools] == [("here", 0, 1, 3)]
    host = made.local
    assert host.program[0] == sys.executable
    assert host.service_file == str(folder / "serverless.yml")
    assert (host.gateway_url, host.secret_file) == ("http://127.0.0.1:8080", str(folder / "state" / "cluster.secret"))
    assert (made.aws, made.state) == (None, None)


def test_nodes_are_replaced_only_for_what_they_read(folder: Path) -> None:
    def revision(**changes: Any) -> str:
        return stack_of(load_service_file(write(folder, **changes)), folder / "state").local.revision

    assert revision() == revision(functions={}, tenants={"acme": {}}, node_pools={})
    assert revision() != revision(node={"dtype": "float32"})


def test_nodes_divide_their_hosts_cores_by_what_their_pools_may_have(folder: Path) -> None:
    pools = {
        "here": {"backend": "local", "desired": 1, "max": 3},
        "gpu.a": {"backend": "local", "desired": 0, "max": 2},
        "far": {"backend": "aws", "instance_type": "g6e.2xlarge", "max": 9},
    }
    service = load_service_file(aws_file(folder, node_pools=pools))
    assert {node: host_nodes_of(service, node) for node in ("here-1", "gpu.a-2", "far-1", "node-1", "here-x", "h")} == {
        "here-1": 5, "gpu.a-2": 5, "far-1": 1, "node-1": 1, "here-x": 1, "h": 1
    }  # fmt: skip
    modules = render(stack_of(service, folder / "state"))["module"]
    assert [modules[f"pool_{name}"]["host_nodes"] for name in ("here", "gpu_a")] == [5, 5]


def test_nodes_report_to_the_gateway_of_this_state(folder: Path) -> None:
    service, state = load_service_file(write(folder)), folder / "state"
    state.mkdir()
    (state / "credentials.toml").write_text('url = "http://127.0.0.1:9000"\ntenant = "default"\n')
    assert gateway_url_of(service, state) == "http://127.0.0.1:9000"
    told = load_service_file(write(folder, infra={"gateway_url": "http://elsewhere:80"}))
    assert gateway_url_of(told, state) == "http://elsewhere:80"


def test_an_address_with_a_password_is_refused(folder: Path) -> None:
    """It would stand in plans, in the state and in what is rendered."""
    with pytest.raises(FrontDoorError, match=r"infra\.gateway_url: expected no user and password") as refused:
        load_service_file(write(folder, infra={"gateway_url": "http://me:s3cret@gateway:8080"}))
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize("package", ["garnish==0.1.0", "garnish", "./dist/garnish-0.1.0-py3-none-any.whl", "s3://b/x"])
def test_a_package_that_is_no_wheel_on_s3_is_refused(folder: Path, package: str) -> None:
    """On PyPI the name belongs to someone else: an instance would run their code."""
    with pytest.raises(FrontDoorError, match=r"infra\.aws\.package: .* is not this project's. Run `make wheel`"):
        load_service_file(aws_file(folder, infra={"gateway_url": "http://g:8080", "aws": {**AWS, "package": package}}))


def test_where_the_state_lies(folder: Path) -> None:
    def directory(**infra: str) -> Path:
        return infra_directory(load_service_file(write(folder, infra=infra)), folder / "state")

    assert directory() == folder / "state" / "infra" / "demo"
    assert directory(state="./tf") == folder / "tf" / "demo"
    assert directory(state="s3://acme-tf/garnish") == folder / "state" / "infra" / "demo"
    far = stack_of(load_service_file(write(folder, infra={"state": "s3://acme-tf/garnish"})), folder)
    assert far.state is not None and (far.state.bucket, far.state.prefix) == ("acme-tf", "garnish")
    for wrong in ("gs://bucket/x", "s3://B/x"):
        with pytest.raises(FrontDoorError, match=r"infra\.state"):
            stack_of(load_service_file(write(folder, infra={"state": wrong})), folder)


def test_a_node_in_aws_reads_no_more_than_it_needs(folder: Path) -> None:
    service = load_service_file(aws_file(folder))
    read = json.loads(node_file(service, folder / "state"))
    assert set(read) == {"service", "base_model", "registry", "node"}
    assert read["base_model"] == "/var/lib/garnish-data/model/llama-8b"
    remote = folder / "node.yml"
    remote.write_text(json.dumps(read))
    assert load_service_file(remote).node == service.node


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"infra": {"aws": AWS}}, r"infra\.gateway_url"),
        ({"registry": "./registry"}, "registry: nodes in AWS need a registry on S3"),
        ({"node": {"simulate": {"link": "1GB/s"}}}, r"node\.simulate: it is for measurement on this host"),
    ],
)
def test_what_nodes_in_aws_need(folder: Path, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(FrontDoorError, match=problem):
        stack_of(load_service_file(aws_file(folder, **changes)), folder)


def test_memory_is_checked_with_the_numbers(folder: Path) -> None:
    check_memory(load_service_file(aws_file(folder)), folder)
    small = {"t4": {"backend": "aws", "instance_type": "g4dn.xlarge"}}
    with pytest.raises(Exception, match=r"node_pools\.t4: .* it needs 21\.5 GiB .* a GPU has 15\.0 GiB"):
        check_memory(load_service_file(aws_file(folder, node_pools=small)), folder)


def test_an_unstated_adapter_memory_is_a_tenth_of_each_pools_gpu(folder: Path) -> None:
    pools = {"t4": {"backend": "aws", "instance_type": "g4dn.xlarge"}}
    file = aws_file(folder, node={"device": "cuda"}, node_pools=pools)
    with pytest.raises(Exception, match=r"15\.0 base model, 1\.5 adapter_memory, 1\.0 keys"):
        check_memory(load_service_file(file), folder)


def test_a_model_that_is_nowhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (folder / "model" / "config.json").unlink()
    with pytest.raises(FrontDoorError, match=r"config\.json of \./model is needed"):
        check_memory(load_service_file(aws_file(folder)), folder)


def vllm_file(folder: Path, kind: str, registry: str = "s3://acme-garnish/reg", **arguments: Any) -> Path:
    node = {"engine": "vllm", "device": "cuda", "vllm": arguments}
    pools = {"p": {"backend": "aws", "instance_type": kind}}
    return aws_file(folder, node=node, node_pools=pools, registry=registry)


def test_slots_of_vllm_are_checked_with_the_numbers(folder: Path) -> None:
    check_memory(load_service_file(vllm_file(folder, "g5.xlarge", max_model_len=8192)), folder)
    with pytest.raises(InfraError) as refused:
        check_memory(load_service_file(vllm_file(folder, "g5.xlarge", max_model_len=8192, max_loras=32)), folder)
    text = str(refused.value)
    assert text.startswith("node_pools.p: A10G of g5.xlarge: the base model and its adapters do not fit on a GPU: 15.0")
    assert "10.0 adapter slots (32 x 0.31) + 1.0 keys and values + 1.0 runtime = 27.0 GiB of 20.2 GiB" in text


def test_a_node_of_several_gpus_needs_an_instance_that_has_them(folder: Path) -> None:
    with pytest.raises(InfraError, match=r"a node needs 2 GPUs, and g5\.xlarge has 1"):
        check_memory(load_service_file(vllm_file(folder, "g5.xlarge", tensor_parallel_size=2)), folder)
    check_memory(load_service_file(vllm_file(folder, "g5.12xlarge", tensor_parallel_size=4)), folder)


def test_a_base_that_only_vllm_serves_is_known_by_its_manifest(folder: Path) -> None:
    """Its config.json alone, without the weights, is on this host."""
    model = folder / "model"
    (model / "config.json").write_text(json.dumps({"model_type": "phi3", "torch_dtype": "bfloat16"}))
    registry = LocalStore(folder / "registry")
    service = load_service_file(vllm_file(folder, "g5.xlarge", str(folder / "registry")))
    with pytest.raises(FrontDoorError, match=r"the registry has no manifest of model, .* `garnish base inspect"):
        check_memory(service, folder)
    for number, rows in enumerate((1_000, 4_000_000)):
        modules = (Module("model.x_proj", LINEAR, {"weight": (rows, 4096)}),)
        inspected = InspectedBase("Phi3ForCausalLM", "phi3", 1, 4096, 100, 4096, 256, True, "lm_head", "model", modules)
        store_manifest(registry, BaseManifest(MANIFEST_VERSION, "other", f"{number}", {}, False, inspected))
        store_manifest(registry, BaseManifest(MANIFEST_VERSION, "model", f"{number}x", {}, False, inspected))
        if rows == 1_000:
            check_memory(service, folder)
    with pytest.raises(InfraError, match=r"30\.5 weights"):
        check_memory(service, folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_a_model_whose_configuration_is_none(folder: Path, text: str) -> None:
    (folder / "model" / "config.json").write_text(text)
    with pytest.raises((FrontDoorError, InfraError), match=r"base_model: .*config\.json"):
        check_memory(load_service_file(aws_file(folder)), folder)


def run(folder: Path, *arguments: str, path: str | None = None) -> Any:
    options = ["-f", str(folder / "serverless.yml"), "--state", str(folder / "state")]
    return CliRunner().invoke(app, ["infra", *arguments, *options], env={"PATH": path} if path is not None else None)


def test_render_needs_no_terraform(folder: Path) -> None:
    aws_file(folder)
    done = run(folder, "render", "--out", str(folder / "out"), "--json", path="")
    assert done.exit_code == 0, done.output
    assert str(folder / "out" / "main.tf.json") in json.loads(done.stdout)["files"]


@pytest.mark.parametrize("command", ["plan", "apply", "destroy", "show"])
def test_without_terraform_it_is_said_what_to_install(folder: Path, command: str) -> None:
    write(folder)
    done = run(folder, command, path=str(folder))
    assert isinstance(done.exception, FrontDoorError)
    assert "install Terraform 1.10 or newer" in str(done.exception)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("  a: {backend: local, min: 3, desired: 1, max: 2}\n", "node_pools.a: expected min <= desired <= max"),
        ("  a: {backend: local}\n  a: {backend: local}\n", "serverless.yml:5: node_pools.a: the key occurs twice"),
        ("  a: {backend: local, count: 3}\n", "unknown key"),
        ("  node: {backend: local}\n", "give the pool another name"),
    ],
)
def test_pools_that_can_not_be(folder: Path, text: str, problem: str) -> None:
    (folder / "serverless.yml").write_text(f"service: demo\nbase_model: ./model\nnode_pools:\n{text}")
    done = run(folder, "plan")
    assert isinstance(done.exception, FrontDoorError)
    assert problem in str(done.exception)


@pytest.mark.parametrize(
    ("instance_type", "problem"),
    [
        ("g4dn.xlarge", r"it needs 21\.5 GiB \(15\.0 base model, 4\.0 adapter_memory, .*\), and a GPU has 15\.0 GiB"),
        ("g6e.2xlrge", "unknown instance type 'g6e.2xlrge'; did you mean g6e.2xlarge"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "apply"])
def test_gpus_that_can_not_be_are_refused_before_terraform_is_asked(
    folder: Path, command: str, instance_type: str, problem: str
) -> None:
    aws_file(folder, node_pools={"a": {"backend": "aws", "instance_type": instance_type}})
    done = run(folder, command, path="")
    assert isinstance(done.exception, FrontDoorError)
    assert re.search(rf"node_pools\.a.*{problem}", str(done.exception)), done.exception
    assert not (folder / "state").exists()


def test_missing_credentials_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    far = stack_of(load_service_file(write(folder, infra={"state": "s3://acme-tf/garnish"})), folder)
    with pytest.raises(InfraError, match="AWS credentials are missing: set AWS_PROFILE"):
        check_credentials(far)
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(InfraError, match=r"AWS credentials can't be used: .*\(nobody\)"):
        check_credentials(far)
    monkeypatch.delenv("AWS_PROFILE")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
    with pytest.raises(InfraError, match=r"can't be used: .*missing: AWS_SECRET_ACCESS_KEY"):
        check_credentials(far)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of-an-example")
    with pytest.raises(InfraError, match="set AWS_REGION"):
        check_credentials(far)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
    check_credentials(far)
    check_credentials(stack_of(load_service_file(write(folder)), folder))
