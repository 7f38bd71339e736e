"""A gateway over a base that only vLLM serves: it starts from the manifest, checks deploys, names files to nodes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from running_gateway import Running, start_gateway, until, upload

from adapters.base_manifest import MANIFEST_VERSION, BaseManifest, store_manifest
from adapters.base_model import UnsupportedBase, fingerprint
from adapters.local_store import LocalStore
from node_agent.base_inspection import inspect_base
from tests.support.foreign_bases import TARGETS, write_foreign_base
from tests.support.peft_reference import make_adapter


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, stories_dir: Path) -> Path:
    return write_foreign_base("phi3", tmp_path_factory.mktemp("base") / "phi3", stories_dir)


@pytest.fixture
def gateway(model: Path, tmp_path: Path) -> Iterator[Running]:
    manifest = BaseManifest(MANIFEST_VERSION, "phi3", fingerprint(model), {}, False, inspect_base(model))
    store_manifest(LocalStore(tmp_path / "registry"), manifest)
    with ExitStack() as stack:
        yield start_gateway(stack, model, tmp_path, max_lora_rank=8)


def test_without_a_manifest_it_does_not_start(model: Path, tmp_path: Path) -> None:
    with ExitStack() as stack, pytest.raises(UnsupportedBase, match="garnish base inspect --store"):
        start_gateway(stack, model, tmp_path)


def test_calls_give_nodes_the_names_of_the_files(gateway: Running, model: Path, tmp_path: Path) -> None:
    files = upload(make_adapter(model, tmp_path / "a", 1, r=4, lora_alpha=8, target_modules=TARGETS["phi3"]))
    hashes = [hashlib.sha256(content).hexdigest() for _, content in files.values()]
    node, client = gateway.node(), gateway.client()
    done = client.post("/deploy/f", files=files)
    assert done.status_code == 201, done.text
    assert client.post("/invoke/f", json={"prompt": "x"}).status_code == 200
    adapter = node.received[-1].adapter
    assert adapter is not None
    assert (adapter.artifact, adapter.config, adapter.weights) == ("", *hashes)
    admin = gateway.client("admin")
    path = f"/nodes/{node.node_id}/prefetch"
    refused = admin.post(path, json={"digest": adapter.digest})
    assert (refused.status_code, refused.json()["error"]["param"]) == (422, "digest")
    assert admin.post(path, json={"function": "f"}, headers={"x-garnish-tenant": "acme"}).status_code == 202
    assert node.prefetched[-1] == adapter


def test_a_warm_deploy_gives_the_node_the_names_of_the_files(
    gateway: Running, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.residency.warm_on_deploy.WARM_SECONDS", 1.0)  # the stub's load never ends
    files = upload(make_adapter(model, tmp_path / "a", 1, r=4, lora_alpha=8, target_modules=["o_proj"]))
    node = gateway.node()
    done = gateway.client().post("/deploy/f", files=files, params={"warm": "true"})
    assert done.status_code == 201, done.text
    until(lambda: bool(node.prefetched))
    expected = [hashlib.sha256(content).hexdigest() for _, content in files.values()]
    assert [node.prefetched[-1].config, node.prefetched[-1].weights] == expected


def test_what_does_not_fit_is_refused_with_its_problems(gateway: Running, model: Path, tmp_path: Path) -> None:
    client = gateway.client()
    high = upload(make_adapter(model, tmp_path / "high", 1, r=16, lora_alpha=8, target_modules=["o_proj"]))
    plain = upload(make_adapter(model, tmp_path / "plain", 1, r=4, lora_alpha=8, target_modules=["o_proj"]))
    name, config = plain["adapter_config.json"]
    head = {**plain, name: (name, json.dumps({**json.loads(config), "target_modules": ["o_proj", "lm_head"]}))}
    for files, place, problem in (
        (high, "adapter_config.json#r", "above the largest rank"),
        (head, "adapter_config.json#target_modules", "computes the logits"),
    ):
        refused = client.post("/deploy/f", files=files)
        assert refused.status_code == 422
        details = refused.json()["error"]["details"]
        assert any(each["tensor"] == place and problem in each["problem"] for each in details), details
    assert client.get("/functions/f").status_code == 404
