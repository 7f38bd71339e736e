"""A gateway without its base model's manifest: it waits for a node's, checks it, and then serves deploys."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from running_gateway import Running, start_gateway, upload
from test_gateway_server import process, wait_for

from adapters.base_manifest import (
    MANIFEST_VERSION,
    BaseManifest,
    NoManifest,
    find_manifest,
    manifest_key,
    store_manifest,
)
from adapters.base_model import fingerprint
from adapters.local_store import LocalStore
from cluster.messages import BASE_PATH
from cluster.secret import authorization, create_secret
from gateway.catalog.node_manifests import MANIFEST_LIMIT
from gateway.config import GatewayConfig
from node_agent.base_manifests import NotMade, make_manifest, send_manifest
from node_agent.config import EngineConfig, EngineProcessConfig
from node_agent.vllm.process import known_base
from tests.support.foreign_bases import TARGETS, write_foreign_base
from tests.support.peft_reference import make_adapter
from tests.support.ports import free_port


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, stories_dir: Path) -> Path:
    return write_foreign_base("phi3", tmp_path_factory.mktemp("base") / "phi3", stories_dir)


@pytest.fixture(scope="module")
def manifest(model: Path) -> BaseManifest:
    return make_manifest(model, "as-the-node-names-it")


def config_of(model: Path, folder: Path, **changed: Any) -> GatewayConfig:
    create_secret(folder / "secret")
    return GatewayConfig(
        model_dir=str(model),
        base_id="phi3",
        registry=str(folder / "registry"),
        secret_file=str(folder / "secret"),
        tmp_dir=str(folder / "uploads"),
        port=free_port(),
        auth="none",
        shutdown_seconds=1.0,
        waits_for_base=True,
        **changed,
    )


def until_ready(url: str, child: Any) -> None:
    """Waits until the real gateway listens, which describes its API."""
    while wait_for(url, "/openapi.json", child).status_code != 200:
        pass


def test_a_node_makes_the_manifest_and_deploys_work(model: Path, manifest: BaseManifest, tmp_path: Path) -> None:
    config = config_of(model, tmp_path)
    url, secret = f"http://127.0.0.1:{config.port}", (tmp_path / "secret").read_text().strip()
    adapter = upload(make_adapter(model, tmp_path / "a", 1, r=4, target_modules=TARGETS["phi3"]))
    with process(config, tmp_path / "log") as child:
        assert wait_for(url, "/healthz", child).status_code == 200
        for answer in (
            wait_for(url, "/readyz", child),
            httpx.post(f"{url}/deploy/f", files=adapter, timeout=30),
            httpx.post(f"{url}/cluster/record", content=b"", timeout=30),
        ):
            assert answer.status_code == 503, answer.text
            assert "waits for the manifest of its base model" in answer.json()["error"]["message"]
        send_manifest(manifest, url, secret, seconds=60)
        until_ready(url, child)
        done = httpx.post(f"{url}/deploy/f", files=adapter, timeout=60)
        assert done.status_code == 201, done.text
        assert sorted(done.json()["targets"]) == ["down", "gate_up", "o", "qkv"]
    stored = find_manifest(LocalStore(tmp_path / "registry"), manifest.fingerprint)
    assert stored == msgspec.structs.replace(manifest, id="phi3"), "under the id that the gateway knows"


def test_a_nodes_engine_process_sends_what_the_registry_lacks(model: Path, tmp_path: Path) -> None:
    config = config_of(model, tmp_path)
    store, url = LocalStore(tmp_path / "registry"), f"http://127.0.0.1:{config.port}"
    settings = EngineConfig(model_dir=str(model), base_id="n", registry=config.registry, engine="vllm")
    with pytest.raises(NoManifest):
        known_base(EngineProcessConfig(socket="", engine=settings), store)
    node = EngineProcessConfig(socket="", engine=settings, gateway_url=url, secret_file=config.secret_file)
    with process(config, tmp_path / "log") as child:
        wait_for(url, "/healthz", child)
        base = known_base(node, store)
        assert base.fingerprint == fingerprint(model) and base.modules.adaptable
        until_ready(url, child)
    assert known_base(node, store) == base, "read from the registry: no gateway answers"


def test_a_manifest_that_is_stored_by_other_means_ends_the_wait(
    model: Path, manifest: BaseManifest, tmp_path: Path
) -> None:
    config = config_of(model, tmp_path)
    url = f"http://127.0.0.1:{config.port}"
    with process(config, tmp_path / "log") as child:
        assert wait_for(url, "/readyz", child).status_code == 503
        store_manifest(LocalStore(tmp_path / "registry"), manifest)
        until_ready(url, child)


def test_a_signal_ends_the_wait(model: Path, tmp_path: Path) -> None:
    config = config_of(model, tmp_path)
    with process(config, tmp_path / "log") as child:
        wait_for(f"http://127.0.0.1:{config.port}", "/healthz", child)
        child.send_signal(signal.SIGTERM)
        assert child.wait(30) in (0, -signal.SIGTERM)
    assert not (tmp_path / "registry" / "bases").exists()


@pytest.fixture(scope="module")
def gateway(model: Path, manifest: BaseManifest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("gateway")
    store_manifest(LocalStore(folder / "registry"), manifest)
    with ExitStack() as stack:
        yield start_gateway(stack, model, folder)


def post(gateway: Running, body: bytes, secret: str | None = None) -> httpx.Response:
    headers = authorization(gateway.secret if secret is None else secret)
    return httpx.post(gateway.url + BASE_PATH, content=body, headers=headers, timeout=60)


Change = Callable[[dict[str, Any]], Any]
WRONG: dict[str, tuple[Change, str]] = {
    "another version": (lambda m: m.update(version=1), f"it has version 1, and {MANIFEST_VERSION} is read here"),
    "another base": (lambda m: m.update(fingerprint="f" * 64), "its fingerprint ffffffffffff differs from"),
    "another tokenizer": (lambda m: m["tokenizer"].update({"tokenizer.json": "0" * 64}), "tokenizer.json differs"),
    "another file": (lambda m: m["tokenizer"].update({"../secret": "0" * 64}), "none of a tokenizer's"),
    "no layers": (lambda m: m["base"].update(num_layers=0), "num_layers is 0: expected a number above 0"),
    "a huge vocabulary": (lambda m: m["base"].update(vocab_size=1 << 50), "vocab_size is"),
    "a module twice": (lambda m: m["base"]["modules"].append(m["base"]["modules"][0]), "each with its own name"),
    "a long name": (lambda m: m["base"]["modules"][0].update(name="x" * 501), "names of 1 to 500 characters"),
    "a module without weights": (
        lambda m: next(each for each in m["base"]["modules"] if each.get("kind") == "linear").update(parameters={}),
        "a linear module needs a weight of two dimensions",
    ),
    "a shape of nothing": (
        lambda m: next(each for each in m["base"]["modules"] if each.get("kind") == "linear").update(
            parameters={"weight": [0, 8]}
        ),
        "a parameter has no shape",
    ),
    "nothing to adapt": (lambda m: m["base"].update(decoder="elsewhere"), "no adapter can change it"),
    "another type": (lambda m: m["base"].update(modules={}), "Expected `array`"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_manifest_is_refused_with_the_reason(name: str, gateway: Running, manifest: BaseManifest) -> None:
    change, problem = WRONG[name]
    fields = json.loads(msgspec.json.encode(manifest))
    change(fields)
    answer = post(gateway, json.dumps(fields).encode())
    assert answer.status_code == 422, answer.text
    assert problem in answer.json()["error"]["message"], answer.text


def test_only_nodes_of_this_service_may_send_one(gateway: Running, manifest: BaseManifest) -> None:
    body = msgspec.json.encode(manifest)
    assert post(gateway, body, "x" * 40).status_code == 401
    assert post(gateway, b"[" * (MANIFEST_LIMIT + 1)).status_code == 413
    assert post(gateway, b"").status_code == 422


def test_a_stored_manifest_stays_and_a_damaged_one_is_replaced(gateway: Running, manifest: BaseManifest) -> None:
    store = LocalStore(Path(gateway.config.registry))
    changed = msgspec.structs.replace(manifest, chat_template=not manifest.chat_template)
    assert post(gateway, msgspec.json.encode(changed)).status_code == 204
    assert find_manifest(store, manifest.fingerprint) == manifest
    store.put(manifest_key(manifest.fingerprint), b"{")
    send_manifest(manifest, gateway.url, gateway.secret, seconds=30)
    assert find_manifest(store, manifest.fingerprint) == msgspec.structs.replace(manifest, id=gateway.base.id)


def test_a_node_says_why_its_manifest_was_not_stored(gateway: Running, manifest: BaseManifest, model: Path) -> None:
    with pytest.raises(NotMade, match=r"refused: the gateway answered 401"):
        send_manifest(manifest, gateway.url, "x" * 40)
    other = msgspec.structs.replace(manifest, fingerprint="0" * 64)
    with pytest.raises(NotMade, match=r"answered 422: .*config\.json and the weight files must be the same"):
        send_manifest(other, gateway.url, gateway.secret)
    with pytest.raises(TimeoutError, match=r"was not stored within 0 s: .*refused"):
        send_manifest(manifest, f"http://127.0.0.1:{free_port()}", gateway.secret, seconds=0)
    assert fingerprint(model) == manifest.fingerprint
