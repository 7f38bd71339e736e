"""After a change of the base model: artifacts are made again apart from what other functions' calls wait for."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from running_gateway import Running, until
from stub_node import StubNode

from adapters.artifact import artifact_key
from adapters.blobs import blob_key
from adapters.functions import FunctionRecord
from adapters.local_store import LocalStore
from adapters.records import update_record
from adapters.standing import function_key
from adapters.validate import file_sha256
from cluster.messages import Event, Failed, GenerateRequest
from gateway.catalog import rebuilds
from gateway.catalog.threads import READ_THREADS

OTHER_BASE = "e" * 64
Moved = tuple[Running, LocalStore, Sequence[str]]


def deployed(client: httpx.Client, folder: Path, name: str, alpha: int) -> str:
    """Deploys the adapter with another alpha, which makes it another adapter of the same weights; its digest."""
    config = json.loads((folder / "adapter_config.json").read_text()) | {"lora_alpha": alpha}
    files: dict[str, Any] = {
        "adapter_config.json": ("adapter_config.json", json.dumps(config).encode()),
        "adapter_model.safetensors": ("w", (folder / "adapter_model.safetensors").read_bytes()),
    }
    reply = client.post(f"/deploy/{name}", files=files)
    assert reply.status_code == 201, reply.text
    return str(reply.json()["digest"])


def change_base(running: Running, store: LocalStore, name: str, digest: str) -> None:
    """Leaves the function as one that was deployed for another base model."""

    def moved(record: FunctionRecord | None) -> FunctionRecord:
        assert record is not None
        entries = tuple(msgspec.structs.replace(entry, base=OTHER_BASE) for entry in record.versions)
        return msgspec.structs.replace(record, versions=entries, generation=record.generation + 1)

    update_record(store, function_key("acme", name), FunctionRecord, moved)
    store.delete(artifact_key(running.base.fingerprint, digest))


def weights_of(store: LocalStore, folder: Path) -> Path:
    return store.root / blob_key(file_sha256(folder / "adapter_model.safetensors"))


@pytest.fixture
def moved(start: Callable[..., Running], stories_adapters: dict[str, Path]) -> Moved:
    """A gateway with functions, more than it has threads for look-ups, all but `here` of another base."""
    running = start()
    running.node()
    store, client = LocalStore(Path(running.config.registry)), running.client()
    names = [f"f{number}" for number in range(READ_THREADS + 4)]
    digests = [deployed(client, stories_adapters["pirate"], name, 16 + alpha) for alpha, name in enumerate(names)]
    deployed(client, stories_adapters["pirate"], "here", 8)
    for name, digest in zip(names, digests, strict=True):
        change_base(running, store, name, digest)
    return running, store, names


def call(client: httpx.Client, name: str) -> httpx.Response:
    return client.post(f"/invoke/{name}", json={"prompt": "x", "max_tokens": 2})


def test_others_are_served_while_artifacts_are_made(
    moved: Moved, stories_adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    running, store, names = moved
    monkeypatch.setattr(rebuilds, "MAX_WAITING", 4)
    blob, client = weights_of(store, stories_adapters["pirate"]), running.client()
    kept = blob.rename(blob.with_name("kept"))
    os.mkfifo(blob)  # whoever reads the weights hangs
    until(lambda: call(client, names[-1]).status_code == 503)  # what was known before the change has expired
    for name in names:
        until(lambda name=name: call(client, name).status_code == 503)  # type: ignore[misc]
    for name in (names[0], names[-1]):
        reply = call(client, name)
        assert reply.status_code == 503
        assert "being made ready for the present base model" in reply.json()["error"]["message"]
        assert int(reply.headers["retry-after"]) >= 1
    assert call(client, "here").status_code == 200
    assert client.get(f"/functions/{names[0]}").status_code == 200
    fifo = blob.rename(blob.with_name("fifo"))
    kept.rename(blob)
    end = os.open(fifo, os.O_WRONLY)
    os.close(end)  # those that hung fail, and are tried again
    statuses = dict.fromkeys(names, 503)

    def settled() -> bool:
        statuses.update({name: call(client, name).status_code for name in names if statuses[name] == 503})
        return 503 not in statuses.values()

    until(settled)
    assert set(statuses.values()) == {200}


def test_files_that_are_damaged_are_named(moved: Moved, stories_adapters: dict[str, Path]) -> None:
    running, store, names = moved
    blob, client = weights_of(store, stories_adapters["pirate"]), running.client()
    blob.write_bytes(b"other")
    until(lambda: call(client, names[0]).status_code == 500)
    reply = call(client, names[0]).json()["error"]
    assert (reply["type"], reply["message"]) == (
        "internal",
        "the stored files of version 1 of function f0 are damaged: deploy the adapter again",
    )


@pytest.mark.parametrize("own", [True, False])
def test_what_a_node_alone_finds_damaged_is_not_written_again(
    start: Callable[..., Running], stories_adapters: dict[str, Path], own: bool
) -> None:
    """The registry has what was written; and of another adapter a node has nothing to say."""
    running, digests = start(), list[str]()

    async def finds_damage(_: StubNode, __: GenerateRequest) -> AsyncIterator[Event | bytes]:
        digest = digests[0] if own else "0" * 64
        yield Failed(type="unavailable", message="could not be loaded", retryable=True, damaged=digest)

    running.node(finds_damage)
    store, client = LocalStore(Path(running.config.registry)), running.client()
    digests.append(deployed(client, stories_adapters["pirate"], "f", 16))
    key = artifact_key(running.base.fingerprint, digests[0])
    before = store.head(key)
    for _ in range(3):
        reply = call(client, "f")
        told = "the artifact of version 1 of function f was damaged: it is being made again"
        assert reply.status_code == 503
        assert reply.json()["error"]["message"] == (told if own else "could not be loaded")
    assert store.head(key) == before
    running.node()
    until(lambda: call(client, "f").status_code == 200)
