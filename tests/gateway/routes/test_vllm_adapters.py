"""Training loops push adapters by vLLM's routes: what their code sends, from folders of the gateway's host."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest
from running_gateway import Running, as_new, start_gateway

from adapters.errors import InvalidRequest, StoreUnavailable, TooLarge
from adapters.sources import Forbidden, Sources

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, stories_adapters: dict[str, Path]) -> Path:
    """An allowed folder with two steps of a training run, and a folder beside it."""
    top = tmp_path_factory.mktemp("training")
    for number, name in enumerate(("pirate", "dragon"), 1):
        shutil.copytree(stories_adapters[name], top / "runs" / f"step-{number}")
    shutil.copytree(stories_adapters["pirate"], top / "runs-other" / "step-1")
    return top / "runs"


@pytest.fixture(scope="module")
def allowing(stories_dir: Path, runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with ExitStack() as stack:
        folder = tmp_path_factory.mktemp("gateway")
        running = start_gateway(stack, stories_dir, folder, allowed_sources=(f"file://{runs}",))
        running.node()
        yield running


@pytest.fixture
def gateway(allowing: Running) -> Iterator[Running]:
    with as_new(allowing) as running:
        yield running


def load(gateway: Running, **fields: Any) -> httpx.Response:
    return gateway.client().post("/v1/load_lora_adapter", json=fields)


def called(gateway: Running, model: str = "policy") -> str:
    """The digest of the adapter that a call has on its node."""
    body = {"model": model, "prompt": "x", "max_tokens": 1}
    assert gateway.client().post("/v1/completions", json=body).status_code == 200
    adapter = gateway.nodes[0].received[-1].adapter
    return "" if adapter is None else adapter.digest


def test_a_loop_pushes_each_step_and_calls_it_at_once(gateway: Running, runs: Path) -> None:
    """First without `load_inplace`, then with it, as trainers do; the texts are vLLM's."""
    first = load(gateway, lora_name="policy", lora_path=str(runs / "step-1"), base_model_name="")
    assert (first.status_code, first.text) == (200, "Success: LoRA adapter 'policy' added successfully.")
    before = called(gateway)
    again = load(gateway, lora_name="policy", lora_path=str(runs / "step-2"))
    assert again.status_code == 400
    assert "The lora adapter 'policy' has already been loaded. If you want to load" in again.json()["error"]["message"]
    assert called(gateway) == before
    fields = {"load_inplace": True, "base_model_name": "/models/stories260K"}
    second = load(gateway, lora_name="policy", lora_path=f"file://{runs}/step-2", **fields)
    assert (second.status_code, called(gateway) != before) == (200, True)
    assert called(gateway, "policy:1") == before
    function = gateway.client().get("/functions/policy").json()
    assert (len(function["versions"]), function["aliases"]) == (2, {"latest": 2})
    gone = gateway.client().post("/v1/unload_lora_adapter", json={"lora_name": "policy", "lora_int_id": 1})
    assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'policy' removed successfully.")
    missing = gateway.client().post("/v1/unload_lora_adapter", json={"lora_name": "policy"})
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    assert "The lora adapter 'policy' cannot be found." in missing.json()["error"]["message"]
    assert gateway.client().get("/functions").json()["functions"] == []


def test_what_is_refused_names_the_field(gateway: Running, runs: Path) -> None:
    step = str(runs / "step-1")
    (runs / "empty").mkdir(exist_ok=True)
    cases: list[tuple[dict[str, Any], int, str]] = [
        ({"lora_name": "org/policy", "lora_path": step}, 400, "lora_name"),
        ({"lora_name": "Policy", "lora_path": step}, 400, "lora_name"),
        ({"lora_name": "policy"}, 400, "lora_path"),
        ({"lora_name": "policy", "lora_path": step, "base_model_name": "gpt2"}, 400, "base_model_name"),
        ({"lora_name": "policy", "lora_path": step, "is_3d_lora_weight": True}, 400, "is_3d_lora_weight"),
        ({"lora_name": "policy", "lora_path": step, "lora_tensors": {}}, 400, "lora_tensors"),
        ({"lora_name": "policy", "lora_path": str(runs / "absent")}, 400, "lora_path"),
        ({"lora_name": "policy", "lora_path": str(runs / "empty")}, 400, "lora_path"),
        ({"lora_name": "policy", "lora_path": str(runs.with_name("runs-other") / "step-1")}, 403, "lora_path"),
        ({"lora_name": "policy", "lora_path": f"{runs}/../runs-other/step-1"}, 403, "lora_path"),
        ({"lora_name": "policy", "lora_path": "s3://garnish-tests/runs"}, 403, "lora_path"),
        ({"lora_name": "policy", "lora_path": "acme/adapter-on-the-hub"}, 403, "lora_path"),
    ]
    for fields, status, param in cases:
        reply = load(gateway, **fields)
        assert (reply.status_code, reply.json()["error"]["param"]) == (status, param), (fields, reply.text)
    assert gateway.client().get("/functions").json()["functions"] == []
    other = gateway.client("other").post("/v1/unload_lora_adapter", json={"lora_name": "policy"})
    assert other.status_code == 404


def test_a_folder_is_a_source_of_deploys_too(gateway: Running, runs: Path) -> None:
    source = f"file://{runs}/step-1"
    reply = gateway.client().post("/deploy/f", json={"source": source, "alias": "prod"})
    assert (reply.status_code, reply.json()["version"]) == (201, 1)
    assert gateway.client().get("/functions/f/versions/1").json()["source"] == source


def copied(sources: Sources, source: Path, folder: Path, limit: int = 1 << 20, stop: Event | None = None) -> bytes:
    deadline, stopped = time.monotonic() + 60, stop or Event()
    return sources.copy(sources.place(str(source)), folder, limit=limit, deadline=deadline, stop=stopped).config


def test_links_are_followed_inside_of_the_allowed_folder_only(runs: Path, tmp_path: Path) -> None:
    """As the Hub's cache has them: a snapshot's files are links to blobs."""
    sources, config = Sources([f"file://{runs}"]), (runs / "step-1" / CONFIG).read_bytes()
    snapshot = runs / "snapshot"
    snapshot.mkdir()
    for name in (CONFIG, WEIGHTS):
        (snapshot / name).symlink_to(runs / "step-1" / name)
    assert copied(sources, snapshot, tmp_path) == config
    assert (tmp_path / WEIGHTS).read_bytes() == (runs / "step-1" / WEIGHTS).read_bytes()
    out = runs / "out"
    out.symlink_to(runs.with_name("runs-other") / "step-1")
    (snapshot / WEIGHTS).unlink()
    (snapshot / WEIGHTS).symlink_to(runs.with_name("runs-other") / "step-1" / WEIGHTS)
    for source in (out, snapshot):
        with pytest.raises(InvalidRequest, match="a link that leads out of the allowed folder"):
            copied(sources, source, tmp_path)


def test_files_that_can_not_be_copied(runs: Path, tmp_path: Path) -> None:
    sources = Sources([f"file://{runs}", "s3://garnish-tests"])
    odd = runs / "odd"
    odd.mkdir()
    for make, says in ((os.mkfifo, "is no file"), (os.mkdir, "is no file"), (Path.touch, "is empty")):
        make(odd / CONFIG)
        with pytest.raises(InvalidRequest, match=f"{CONFIG} in the source {says}"):
            copied(sources, odd, tmp_path)
        os.rmdir(odd / CONFIG) if (odd / CONFIG).is_dir() else (odd / CONFIG).unlink()
    with pytest.raises(TooLarge, match=f"{WEIGHTS} in the source has"):
        copied(sources, runs / "step-1", tmp_path, limit=2000)
    stop = Event()
    stop.set()
    with pytest.raises(StoreUnavailable):
        copied(sources, runs / "step-1", tmp_path, stop=stop)
    for source in ("/", "/etc", str(runs.parent), f"{runs}2", f"{runs}/../x", f"{runs}\0", "file://x", "runs"):
        with pytest.raises(Forbidden):
            sources.place(source)
    with pytest.raises(Forbidden):
        Sources(["s3://garnish-tests"]).place(str(runs))
