"""Deploys over HTTP: what is stored, what is refused, and that nothing is left behind."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import safetensors.torch
from raw_http import send
from running_gateway import Running, upload

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture
def gateway(reused: Running) -> Running:
    return reused


def leftovers(running: Running) -> list[Path]:
    return list(Path(running.config.tmp_dir).iterdir())


def test_versions_and_aliases(gateway: Running, pirate: dict, stories_adapters: dict[str, Path]) -> None:
    client = gateway.client()
    first = client.post("/deploy/f", files=pirate)
    assert first.status_code == 201
    assert first.json()["version"] == 1
    again = client.post("/deploy/f", files=pirate)
    assert (again.status_code, again.json()) == (200, first.json())
    second = client.post("/deploy/f", files=upload(stories_adapters["dragon"]), data={"alias": "beta"})
    assert (second.status_code, second.json()["version"]) == (201, 2)
    assert client.get("/functions/f").json()["aliases"] == {"latest": 1, "beta": 2}
    assert client.post("/invoke/f:beta", json={"prompt": "x"}).json()["version"] == 2
    assert client.post("/invoke/f", json={"prompt": "x"}).json()["version"] == 1
    assert client.post("/deploy/f", files=upload(stories_adapters["dragon"])).status_code == 200
    assert client.post("/invoke/f", json={"prompt": "x"}).json()["version"] == 2  # at once, whatever was cached
    assert leftovers(gateway) == []


def test_an_adapter_that_no_node_can_hold_is_warned_of(start: Callable[..., Running], pirate: dict) -> None:
    running = start()
    client = running.client()

    def warnings() -> list[list[str]]:
        return [client.post(path, files=pirate).json()["warnings"] for path in ("/deploy/f?dry_run=true", "/deploy/f")]

    assert warnings() == [[], []]  # no node is known
    size = client.get("/functions/f/versions/1").json()["bytes"]
    own = {"adapter_bytes": 9 * size, "adapter_itemsize": 2}  # as the adapter's file
    small = running.node(**own, largest_adapter=size - 1)
    found = warnings()
    assert found[0] == found[1]
    assert f"takes {size} bytes on a node, and the roomiest one has {size - 1} bytes" in found[0][0]
    running.node(**own, largest_adapter=size + 5, base="another")
    assert warnings() == found
    small.publish(running.url, **own, largest_adapter=size)
    assert warnings() == [[], []]
    wide = own | {"adapter_itemsize": 4}
    small.publish(running.url, **wide, largest_adapter=2 * size - 1)
    assert f"takes {2 * size} bytes" in warnings()[0][0]
    small.publish(running.url, **wide, largest_adapter=2 * size)
    assert warnings() == [[], []]
    small.publish(running.url, state="warming")  # it says nothing of its memory
    assert warnings() == [[], []]


def test_dry_run_stores_nothing(gateway: Running, pirate: dict) -> None:
    client = gateway.client()
    reply = client.post("/deploy/f?dry_run=true", files=pirate)
    assert reply.status_code == 200
    assert reply.json()["version"] is None
    assert reply.json()["ranks"] == [8]
    assert client.get("/functions").json() == {"functions": [], "next": None}
    assert client.post("/deploy/f?dry_run=maybe", files=pirate).status_code == 422


def test_file_names_will_do_for_field_names(gateway: Running, pirate: dict) -> None:
    files = [("files", pirate[CONFIG]), ("files", pirate[WEIGHTS])]
    assert gateway.client().post("/deploy/f", files=files).status_code == 201


def test_curl_as_documented(gateway: Running, stories_adapters: dict[str, Path]) -> None:
    folder = stories_adapters["pirate"]
    files = [part for name in (CONFIG, WEIGHTS) for part in ("-F", f"{name}=@{folder / name}")]
    key = f"authorization: Bearer {gateway.keys['acme']}"
    done = subprocess.run(
        ["curl", "-sS", "-H", key, *files, f"{gateway.url}/deploy/f"], capture_output=True, timeout=60, check=True
    )
    assert json.loads(done.stdout)["version"] == 1


@pytest.mark.parametrize(
    "name", ["..%2Fx", "../x", "%2e%2e", "a%00b", "a" * 300, "Upper", "-a", "a b", "%ff", "f:1", "stories260K"]
)
def test_bad_names(gateway: Running, pirate: dict, name: str) -> None:
    body = httpx.Request("POST", gateway.url, files=pirate)
    data = body.read()
    head = (
        f"POST /deploy/{name} HTTP/1.1\nhost: x\nx-api-key: {gateway.keys['acme']}\n"
        f"content-type: {body.headers['content-type']}\ncontent-length: {len(data)}"
    )
    if " " in name:
        head = head.replace(name, name.replace(" ", "%20"))
    status, reply = send(gateway.url, head, data)
    assert (status, reply["error"]["type"], reply["error"]["param"]) == (422, "validation_failed", "name")
    head = head.replace("/deploy/", "/invoke/").replace(body.headers["content-type"], "application/json")
    if name != "stories260K":
        status, reply = send(gateway.url, head.rsplit("\n", 1)[0] + "\ncontent-length: 14", b'{"prompt":"x"}')
        assert (status, reply["error"]["type"]) == (404, "not_found")


def test_every_problem_is_listed(gateway: Running, pirate: dict) -> None:
    config = json.loads(pirate[CONFIG][1]) | {"use_dora": True, "bias": "all"}
    files = pirate | {CONFIG: (CONFIG, json.dumps(config).encode())}
    reply = gateway.client().post("/deploy/f", files=files)
    assert reply.status_code == 422
    details = reply.json()["error"]["details"]
    assert {"adapter_config.json#use_dora", "adapter_config.json#bias"} <= {entry["tensor"] for entry in details}
    assert all(set(entry) == {"tensor", "problem", "expected", "found"} for entry in details)
    assert leftovers(gateway) == []


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_an_uploaded_pointer_of_git_lfs(gateway: Running, pirate: dict, name: str) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 2350080\n"
    reply = gateway.client().post("/deploy/f", files=pirate | {name: (name, pointer)})
    (problem,) = reply.json()["error"]["details"]
    assert (reply.status_code, problem["tensor"]) == (422, name)
    assert problem["problem"] == "a Git LFS pointer, not the file itself: run `git lfs pull` in its repository"


def test_an_uploaded_pickle_by_its_own_name(gateway: Running, pirate: dict) -> None:
    """Refused at its part's head, unread."""
    files = {CONFIG: pirate[CONFIG], "adapter_model.bin": ("adapter_model.bin", b"\x80\x02}q\x00.")}
    reply = gateway.client().post("/deploy/f", files=files)
    error = reply.json()["error"]
    assert (reply.status_code, error["type"], error["param"]) == (422, "validation_failed", "adapter_model.bin")
    assert error["message"] == (
        "adapter_model.bin is a pickle, which is never read, for it could run code: "
        "docs/guide/adapters.md says how to convert it"
    )
    assert leftovers(gateway) == []


def test_tensors_that_carry_an_adapter_s_name(gateway: Running, pirate: dict, tmp_path: Path) -> None:
    tensors = safetensors.torch.load(pirate[WEIGHTS][1])
    named = {name.replace(".weight", ".default.weight"): tensor for name, tensor in tensors.items()}
    data = safetensors.torch.save(named)
    client = gateway.client()
    assert client.post("/deploy/f", files=pirate | {WEIGHTS: (WEIGHTS, data)}).status_code == 201
    named[next(iter(tensors))] = named.pop(next(iter(named)))
    reply = client.post("/deploy/f", files=pirate | {WEIGHTS: (WEIGHTS, safetensors.torch.save(named))})
    (problem,) = reply.json()["error"]["details"]
    assert reply.status_code == 422
    assert "carries an adapter's name (default) and other tensors' names do not" in problem["problem"]


@pytest.mark.parametrize(
    "weights",
    [
        b"\x80\x02}q\x00.",
        b"PK\x03\x04zip",
        (2 << 30).to_bytes(8, "little") + b"{}",
        b"",
        b"\x00" * 100,
    ],
)
def test_files_that_are_no_safetensors(gateway: Running, pirate: dict, weights: bytes) -> None:
    reply = gateway.client().post("/deploy/f", files=pirate | {WEIGHTS: (WEIGHTS, weights)})
    assert (reply.status_code, reply.json()["error"]["type"]) == (422, "validation_failed")
    assert gateway.client().post("/deploy/f", files=pirate).status_code == 201


@pytest.mark.parametrize(
    "config", [b"{", b'{"r": NaN}', b'{"r": "\\ud800"}', b"[" * 100_000, b'{"r": 1, "r": 2}', b"\xff"]
)
def test_broken_config(gateway: Running, pirate: dict, config: bytes) -> None:
    reply = gateway.client().post("/deploy/f", files=pirate | {CONFIG: (CONFIG, config)})
    assert reply.status_code == 422


def test_missing_twice_and_unknown_parts(gateway: Running, pirate: dict) -> None:
    client = gateway.client()
    missing = client.post("/deploy/f", files={CONFIG: pirate[CONFIG]})
    assert (missing.status_code, missing.json()["error"]["param"]) == (422, WEIGHTS)
    twice = client.post("/deploy/f", files=[(CONFIG, pirate[CONFIG]), (CONFIG, pirate[CONFIG])])
    assert (twice.status_code, twice.json()["error"]["param"]) == (422, CONFIG)
    unknown = client.post("/deploy/f", files=pirate | {"other": ("other.bin", b"x")})
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (422, "other")
    assert leftovers(gateway) == []


def test_policy_and_alias(gateway: Running, pirate: dict) -> None:
    client = gateway.client()
    for policy, status, param in [
        ('{"timeout": 5', 400, "policy"),
        ("[]", 422, "policy"),
        ('{"provisioned": 1}', 422, "policy.provisioned"),
        ('{"timeout": -1}', 422, "policy.timeout"),
        ('{"defaults": {"stop": [1]}}', 422, "policy.defaults.stop[0]"),
        ('{"defaults": {"odd": 1}}', 422, "policy.defaults"),
        ('{"timeout": ' + "1" * 5000 + "}", 400, "policy"),
    ]:
        reply = client.post("/deploy/f", files=pirate, data={"policy": policy})
        assert (reply.status_code, reply.json()["error"]["param"]) == (status, param), policy
        assert not any(word in reply.json()["error"]["message"] for word in ("$", "sys.")), policy
    for alias in ("12", "Upper", "ü", ""):
        reply = client.post("/deploy/f", files=pirate, data={"alias": alias})
        assert (reply.status_code, reply.json()["error"]["param"]) == (422, "alias"), alias
    assert client.post("/deploy/f", files=pirate, data={"policy": '{"timeout": 5}'}).status_code == 201
    assert client.get("/functions/f").json()["policy"]["timeout"] == 5


def test_sources_and_content_types(gateway: Running) -> None:
    client = gateway.client()
    source = client.post("/deploy/f", json={"source": "s3://bucket/prefix"})
    assert (source.status_code, source.json()["error"]["param"]) == (403, "source")
    assert client.post("/deploy/f", json={"sauce": "x"}).status_code == 422
    reply = client.post("/deploy/f", content=b"x", headers={"content-type": "text/plain"})
    assert (reply.status_code, reply.json()["error"]["type"]) == (415, "unsupported_media_type")


def test_broken_multipart(gateway: Running, pirate: dict) -> None:
    client = gateway.client()
    whole = httpx.Request("POST", gateway.url, files=pirate)
    data, kind = whole.read(), whole.headers["content-type"]
    for body, content_type in [
        (data[: len(data) // 2], kind),
        (b"no multipart at all", kind),
        (data, "multipart/form-data"),
        (data, "multipart/form-data; boundary=other"),
        (b"", kind),
        (data, f"multipart/form-data; boundary={'x' * 5000}"),
    ]:
        reply = client.post("/deploy/f", content=body, headers={"content-type": content_type})
        assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request")
    huge_header = data.replace(b"Content-Disposition", b"X-Long: " + b"x" * 100_000 + b"\r\nContent-Disposition", 1)
    assert client.post("/deploy/f", content=huge_header, headers={"content-type": kind}).status_code == 400
    assert leftovers(gateway) == []


def test_too_large(start: Callable[..., Running], pirate: dict) -> None:
    running = start(deploy_body=50_000)
    client = running.client()
    stated = client.post("/deploy/f", files=pirate)
    assert (stated.status_code, stated.json()["error"]["type"]) == (413, "too_large")
    whole = httpx.Request("POST", running.url, files=pirate)
    data = whole.read()
    chunks = (data[at : at + 4096] for at in range(0, len(data), 4096))  # chunked: no stated length
    unstated = client.post("/deploy/f", content=chunks, headers={"content-type": whole.headers["content-type"]})
    assert unstated.status_code == 413
    config = pirate | {CONFIG: (CONFIG, b" " * ((1 << 20) + 1))}
    assert leftovers(running) == []
    assert client.get("/healthz").status_code == 200
    assert client.post("/deploy/f", files=config).status_code == 413


def test_vanishing_uploader_leaves_nothing(start: Callable[..., Running], pirate: dict) -> None:
    gateway = start()
    whole = httpx.Request("POST", gateway.url, files=pirate)
    data = whole.read()

    def half() -> object:
        yield data[: len(data) // 2]
        raise ConnectionResetError

    client = gateway.client()
    with pytest.raises(ConnectionResetError):
        client.post("/deploy/f", content=half(), headers={"content-type": whole.headers["content-type"]})
    assert client.post("/deploy/g", files=pirate).status_code == 201
    assert [item["name"] for item in client.get("/functions").json()["functions"]] == ["g"]
    gateway.stack.close()  # the server ends once every request has
    assert leftovers(gateway) == []


def test_two_deploys_of_one_name_at_once(gateway: Running, stories_adapters: dict[str, Path]) -> None:
    client = gateway.client()
    names = sorted(stories_adapters)[:4]
    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda name: client.post("/deploy/f", files=upload(stories_adapters[name])), names))
    assert [reply.status_code for reply in replies] == [201] * 4
    assert sorted(reply.json()["version"] for reply in replies) == [1, 2, 3, 4]


def test_a_tenants_open_uploads_hold_up_only_that_tenant(start: Callable[..., Running], pirate: dict) -> None:
    running = start(max_tenant_uploads=1, max_deploys=1)
    whole = httpx.Request("POST", running.url, files=pirate)
    data = whole.read()
    host, port = running.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        head = (
            f"POST /deploy/f HTTP/1.1\r\nhost: x\r\nx-api-key: {running.keys['acme']}\r\n"
            f"content-type: {whole.headers['content-type']}\r\ncontent-length: {len(data)}\r\n"
            "expect: 100-continue\r\n\r\n"
        )
        raw.sendall(head.encode())
        assert raw.recv(100).startswith(b"HTTP/1.1 100")  # the first deploy is being received
        reply = running.client().post("/deploy/g", files=pirate)
        assert (reply.status_code, reply.json()["error"]["type"]) == (429, "overloaded")
        assert reply.headers["retry-after"] == "2"
        assert running.client("other").post("/deploy/g", files=pirate).status_code == 201
        raw.sendall(data)
        assert raw.recv(100).startswith(b"HTTP/1.1 201")
    assert running.client().post("/deploy/g", files=pirate).status_code == 201


def test_uploads_that_no_disk_takes(start: Callable[..., Running], pirate: dict) -> None:
    """An outage that passes, not an error of ours; the registry is untouched and serves on."""
    gateway = start()
    gateway.node()
    client, folder = gateway.client(), Path(gateway.config.tmp_dir)
    assert client.post("/deploy/f", files=pirate).status_code == 201
    folder.rmdir()
    folder.write_text("")  # as on a disk that is full, nothing can be made here
    reply = client.post("/deploy/f", files=pirate)
    assert (reply.status_code, reply.json()["error"]["type"]) == (503, "unavailable")
    assert int(reply.headers["retry-after"]) >= 1 and str(folder) not in reply.text
    assert client.post("/invoke/f", json={"prompt": "x"}).status_code == 200
    folder.unlink()
    folder.mkdir()
    assert client.post("/deploy/f", files=pirate).status_code == 200
