"""Deploys of adapters that lie in a bucket: within the allowed prefixes, whole, bounded, and nothing left behind."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from threading import Event

import httpx
import pytest
from running_gateway import Running

from adapters.errors import InvalidRequest, StoreUnavailable, TooLarge
from adapters.s3_calls import S3Limits
from adapters.s3_store import S3Store
from adapters.s3_url import S3Place
from adapters.sources import Forbidden, Sources

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture
def prefix(s3_endpoint: str, stories_adapters: dict[str, Path]) -> str:
    """`s3://garnish-tests/<this>/runs/7` and `.../runs-other/7` hold the adapter `pirate`."""
    made = uuid.uuid4().hex
    store = S3Store(S3Place("garnish-tests", made))
    for name in (CONFIG, WEIGHTS):
        for folder in ("runs/7", "runs-other/7", "runs/big/7"):
            store.put(f"{folder}/{name}", stories_adapters["pirate"] / name)
    return f"s3://garnish-tests/{made}"


def leftovers(running: Running) -> list[Path]:
    return list(Path(running.config.tmp_dir).iterdir())


def test_a_source_is_deployed_and_named_in_the_manifest(
    start: Callable[..., Running], prefix: str, stories_adapters: dict[str, Path]
) -> None:
    running = start(allowed_sources=(f"{prefix}/runs/",))
    running.node()
    client = running.client()
    source = f"{prefix}/runs/7"
    checked = client.post("/deploy/f?dry_run=true", json={"source": source})
    assert (checked.status_code, checked.json()["version"]) == (200, None)
    made = client.post("/deploy/f", json={"source": source, "alias": "prod", "policy": {"timeout": 5}})
    assert (made.status_code, made.json()["version"]) == (201, 1)
    files = {name: (name, (stories_adapters["pirate"] / name).read_bytes()) for name in (CONFIG, WEIGHTS)}
    assert client.post("/deploy/g", files=files).json()["digest"] == made.json()["digest"]
    assert client.get("/functions/f/versions/1").json()["source"] == source
    assert client.get("/functions/g/versions/1").json()["source"] is None
    assert client.get("/functions/f").json()["policy"] == {"timeout": 5}
    assert client.post("/invoke/f:prod", json={"prompt": "x"}).json()["digest"] == made.json()["digest"]
    assert client.post("/deploy/f", json={"source": source + "/"}).status_code == 200
    assert leftovers(running) == []


def test_sources_outside_the_allowed_prefixes_are_refused(start: Callable[..., Running], prefix: str) -> None:
    running = start(allowed_sources=(f"{prefix}/runs",))
    client = running.client()
    replies = {}
    for source in [
        f"{prefix}/runs-other/7",
        f"{prefix}/runs/../runs-other/7",
        f"{prefix}/runs/./7",
        f"{prefix}/runs//7",
        f"{prefix}/runs/%2e%2e/runs-other/7",
        f"{prefix}/runs%2f..%2fruns-other/7",
        f"{prefix}/runs/..\\runs-other",
        f"{prefix}/runs/7?versionId=1",
        f"{prefix}/runs/7#x",
        f"{prefix}/runs/7\n",
        f"{prefix}/runs/7\0",
        prefix,
        "s3://garnish-tests",
        "s3://garnish-tests-other/runs/7",
        "s3://user:password@garnish-tests/runs/7",
        f"S3://{prefix.removeprefix('s3://')}/runs/7",
        f"file://{running.config.model_dir}",
        running.config.model_dir,
        "http://127.0.0.1/x",
        "//garnish-tests/runs/7",
    ]:
        replies[source] = client.post("/deploy/f", json={"source": source})
        told = replies[source].json()["error"]
        assert (replies[source].status_code, told["type"], told["param"]) == (403, "forbidden", "source"), source
        assert "password" not in told["message"]
        assert prefix.removeprefix("s3://") not in told["message"]
    assert client.get("/functions").json()["functions"] == []
    assert leftovers(running) == []


@pytest.mark.parametrize("body", [{"source": ""}, {"source": 1}, {}, {"source": "s3://a/b", "odd": 1}, []])
def test_bodies_that_name_no_source(reused: Running, body: object) -> None:
    assert reused.client().post("/deploy/f", json=body).status_code == 422


def test_what_lies_there_is_checked_like_an_upload(start: Callable[..., Running], prefix: str) -> None:
    running = start(allowed_sources=(prefix,), deploy_body=100_000)
    client = running.client()
    store = S3Store(S3Place("garnish-tests", prefix.rpartition("/")[2]))
    store.put(f"no-weights/{CONFIG}", b"{}")
    store.put(f"empty/{CONFIG}", b"")
    store.put(f"broken/{CONFIG}", b"{")
    store.put(f"broken/{WEIGHTS}", b"x" * 100)
    store.put(f"huge-config/{CONFIG}", b" " * 99_999)
    store.put(f"huge-config/{WEIGHTS}", b"x" * 2)
    store.put(f"huge/{CONFIG}", b"{}")
    store.put(f"huge/{WEIGHTS}", b"x" * 100_001)

    def deploy(folder: str, **more: object) -> tuple[int, str, str | None]:
        reply = client.post("/deploy/f", json={"source": f"{prefix}/{folder}", **more})
        error = reply.json()["error"]
        return reply.status_code, error["message"], error["param"]

    assert deploy("nothing") == (
        422,
        f"there is no {CONFIG} in the source, or it is not shown to this service",
        "source",
    )
    assert deploy("no-weights")[0::2] == (422, "source")
    assert deploy("empty") == (422, f"{CONFIG} in the source is empty", "source")
    assert deploy("broken")[0] == 422
    assert deploy("huge-config")[0] == 413
    assert deploy("huge")[0] == 413
    assert deploy("runs/7", alias="12")[0::2] == (422, "alias")
    assert deploy("runs/7", policy={"odd": 1})[0::2] == (422, "policy.odd")
    assert client.get("/functions").json()["functions"] == []
    assert leftovers(running) == []
    assert client.post("/deploy/Upper", json={"source": f"{prefix}/runs/7"}).json()["error"]["param"] == "name"


def test_a_bucket_that_does_not_answer_is_given_up(
    start: Callable[..., Running], s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = start(allowed_sources=("s3://garnish-tests", "s3://no-such-bucket"), deploy_seconds=0.5)
    client = running.client()
    away = client.post("/deploy/f", json={"source": "s3://no-such-bucket/x"})
    assert (away.status_code, away.json()["error"]["type"]) == (503, "unavailable")
    assert "registry" not in away.json()["error"]["message"]
    assert "retry-after" in away.headers
    assert client.get("/functions").json()["functions"] == []


def copied(folder: Path, source: str, limit: int = 1 << 30, part: int = 8 << 20, stopped: bool = False) -> bytes:
    stop = Event()
    if stopped:
        stop.set()
    sources = Sources(["s3://garnish-tests"], S3Limits(part=part))
    files = sources.copy(sources.place(source), folder, limit=limit, deadline=time.monotonic() + 60, stop=stop)
    return files.weights.read_bytes()


def test_files_come_whole_in_pieces_of_one_content(
    prefix: str, stories_adapters: dict[str, Path], tmp_path: Path
) -> None:
    whole = (stories_adapters["pirate"] / WEIGHTS).read_bytes()
    config = (stories_adapters["pirate"] / CONFIG).read_bytes()
    assert len(whole) > 3 * 10_000
    assert copied(tmp_path, f"{prefix}/runs/7", part=10_000) == whole
    assert copied(tmp_path, f"{prefix}/runs/7", limit=len(whole) + len(config)) == whole
    with pytest.raises(TooLarge):
        copied(tmp_path, f"{prefix}/runs/7", limit=len(whole) + len(config) - 1)
    with pytest.raises(StoreUnavailable):
        copied(tmp_path, f"{prefix}/runs/7", stopped=True)
    with pytest.raises(InvalidRequest, match="there is no adapter_config"):
        copied(tmp_path, f"{prefix}/runs")


def test_a_file_that_is_written_anew_meanwhile_is_refused(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stop event is asked before each piece: a moment in the middle of the copy."""
    store = S3Store(S3Place("garnish-tests", prefix.rpartition("/")[2]))

    class Rewriting(Event):
        asked = 0

        def is_set(self) -> bool:
            self.asked += 1
            if self.asked == 4:
                store.put(f"runs/7/{WEIGHTS}", b"another content" * 10_000)
            return False

    sources = Sources(["s3://garnish-tests"], S3Limits(part=10_000))
    place = sources.place(f"{prefix}/runs/7")
    with pytest.raises(InvalidRequest, match="was rewritten"):
        sources.copy(place, tmp_path, limit=1 << 30, deadline=time.monotonic() + 60, stop=Rewriting())


def test_prefixes_are_compared_in_whole_segments() -> None:
    sources = Sources(["s3://acme-training/runs/", "s3://whole-bucket"])
    for allowed in (
        "s3://acme-training/runs",
        "s3://acme-training/runs/a/b",
        "s3://whole-bucket",
        "s3://whole-bucket/x",
    ):
        assert json.dumps(sources.place(allowed).bucket) in ('"acme-training"', '"whole-bucket"')
    for refused in ("s3://acme-training", "s3://acme-training/run", "s3://acme-training/runs2", "s3://whole-bucket2"):
        with pytest.raises(Forbidden):
            sources.place(refused)
    with pytest.raises(Forbidden):
        Sources([]).place("s3://acme-training/runs")
    for odd in ("http://acme-training", "s3://", "s3://a/../b", "acme-training"):
        with pytest.raises(InvalidRequest):
            Sources([odd])


def test_a_gateway_starts_with_sources_that_are_addresses_only(start: Callable[..., Running]) -> None:
    with pytest.raises(ValueError, match="allowed_sources"):
        start(allowed_sources=("file:///",))


def test_the_reply_of_a_wrong_type_tells_both_ways(reused: Running) -> None:
    reply: httpx.Response = reused.client().post("/deploy/f", content=b"x", headers={"content-type": "text/plain"})
    assert reply.status_code == 415
    assert "multipart/form-data" in reply.json()["error"]["message"]
    assert "application/json" in reply.json()["error"]["message"]
