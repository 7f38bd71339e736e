"""Deploy, invoke, stream, delete: with curl, with the openai client, with our own client and the command line."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
from safetensors.torch import load_file, save_file
from whole_service import Service, eventually

import garnish
from adapters.peft_config import CONFIG_FILE, WEIGHTS_FILE

STORY = Path(__file__).parents[2] / "examples" / "models" / "stories260K" / "stories260K.greedy200.txt"
GREEDY = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}


@pytest.fixture(autouse=True)
def _nothing_is_left(service: Service) -> Iterator[None]:
    yield
    assert eventually(service.nothing_held), service.node()


def curl(service: Service, *arguments: str) -> tuple[int, str]:
    """Status and body."""
    header = f"authorization: {service.headers('acme')['authorization']}"
    done = subprocess.run(
        ["curl", "-sS", "-N", "-m", "60", "-H", header, "-w", "\n%{http_code}", *arguments],
        capture_output=True,
        text=True,
        timeout=70,
    )
    assert done.returncode == 0, done.stderr
    body, _, status = done.stdout.rpartition("\n")
    return int(status), body


def adapter_form(directory: Path) -> list[str]:
    return [part for name in (CONFIG_FILE, WEIGHTS_FILE) for part in ("-F", f"{name}=@{directory / name}")]


def adapter_files(directory: Path) -> dict[str, bytes]:
    return {name: (directory / name).read_bytes() for name in (CONFIG_FILE, WEIGHTS_FILE)}


def test_life_of_a_function_with_curl(service: Service, stories_adapters: dict[str, Path]) -> None:
    form = adapter_form(stories_adapters["space"])
    status, body = curl(service, *form, f"{service.url}/deploy/space")
    assert (status, json.loads(body)["version"]) == (201, 1)
    status, body = curl(service, *form, f"{service.url}/deploy/space")
    assert (status, json.loads(body)["version"]) == (200, 1)

    sent = ["-H", "content-type: application/json", "-d"]
    status, body = curl(service, *sent, json.dumps(GREEDY), f"{service.url}/invoke/space")
    whole = json.loads(body)
    assert (status, whole["version"], whole["usage"]["completion_tokens"]) == (200, 1, 24)

    status, body = curl(service, *sent, json.dumps({**GREEDY, "stream": True}), f"{service.url}/invoke/space")
    events = [
        (block.split("\n")[0], json.loads(block.split("\n")[1].removeprefix("data: ")))
        for block in body.strip().split("\n\n")
        if block.startswith("event: ")
    ]
    assert [name for name, _ in events][-1] == "event: done"
    assert "".join(data["text"] for name, data in events if name == "event: token") == whole["output"]["text"]
    assert events[-1][1]["digest"] == whole["digest"]

    assert curl(service, "-X", "DELETE", f"{service.url}/functions/space") == (204, "")
    status, body = curl(service, *sent, json.dumps(GREEDY), f"{service.url}/invoke/space")
    assert (status, json.loads(body)["error"]["type"]) == (404, "not_found")


def test_declared_function_is_served(service: Service) -> None:
    assert [entry["function"] for entry in service.ready["functions"]] == ["dragon"]
    with service.client("acme") as http:
        reply = http.post("/invoke/dragon", json=GREEDY)
    assert (reply.status_code, reply.headers["x-garnish-version"]) == (200, "1")


def test_an_adapter_changes_the_text(service: Service) -> None:
    with service.client("acme") as http:
        texts = {name: http.post(f"/invoke/{name}", json=GREEDY).json() for name in ("dragon", "stories260K")}
    assert texts["dragon"]["output"]["text"] != texts["stories260K"]["output"]["text"]


def test_base_model_writes_the_known_story(service: Service) -> None:
    """Greedy from BOS, byte for byte what llama2.c wrote."""
    with service.client("acme") as http:
        reply = http.post("/invoke/stories260K", json={"prompt": "", "max_tokens": 200, "temperature": 0}).json()
    written, expected = reply["output"]["text"], STORY.read_text()
    assert written == expected[: len(written)]
    assert len(written) > 400


def test_a_function_is_warm_before_its_first_call(service: Service, stories_adapters: dict[str, Path]) -> None:
    """Host memory by what the leader wants there, the device by an order, a new version before it takes calls."""
    with service.client("acme") as http:
        warm, call = "/functions/warmed/warm", {"prompt": "x", "max_tokens": 1}
        assert http.post("/deploy/warmed", files=adapter_files(stories_adapters["space"])).status_code == 201
        assert http.post(warm, json={"tier": "host"}).status_code == 202
        assert eventually(lambda: http.post(warm, json={"tier": "host"}).json()["ready"])
        assert eventually(lambda: http.post(warm).json()["ready"])
        assert http.post("/invoke/warmed", json=call).headers["x-garnish-cold-start"] == "none"
        second = http.post("/deploy/warmed", params={"warm": "true"}, files=adapter_files(stories_adapters["ocean"]))
        assert (second.status_code, second.json()["warnings"]) == (201, [])
        first = http.post("/invoke/warmed", json=call)
        assert (first.headers["x-garnish-version"], first.headers["x-garnish-cold-start"]) == ("2", "none")

        def is_wanted() -> bool:
            return "order" in {each["cause"] for each in http.get("/functions/warmed/forecast").json()["wanted"]}

        assert eventually(is_wanted)
        http.delete("/functions/warmed")


def test_dry_run_changes_nothing(service: Service, stories_adapters: dict[str, Path]) -> None:
    with service.client("acme") as http:
        files = adapter_files(stories_adapters["ocean"])
        checked = http.post("/deploy/ocean", params={"dry_run": "true"}, files=files)
        assert (checked.status_code, checked.json()["version"]) == (200, None)
        assert http.post("/invoke/ocean", json=GREEDY).status_code == 404
        assert "ocean" not in [item["name"] for item in http.get("/functions").json()["functions"]]


def test_tenants_do_not_see_each_other(service: Service) -> None:
    with service.client("acme") as acme, service.client("globex") as globex:
        assert acme.post("/invoke/dragon", json=GREEDY).status_code == 200
        for method, path in [("POST", "/invoke/{}"), ("GET", "/functions/{}"), ("DELETE", "/functions/{}")]:
            body = GREEDY if method == "POST" else None
            theirs, nobodys = (
                globex.request(method, path.format(name), json=body).json()["error"] for name in ("dragon", "dragoff")
            )
            assert theirs["type"] == nobodys["type"] == "not_found"
            assert theirs["message"].replace("dragon", "dragoff") == nobodys["message"]
        assert globex.get("/functions").json()["functions"] == []
        named = globex.post("/invoke/dragon", json=GREEDY, headers={"x-garnish-tenant": "acme"})
        assert named.status_code == 403
        assert globex.get("/nodes").status_code == 403


def test_two_deploys_of_one_name_at_once(service: Service, stories_adapters: dict[str, Path]) -> None:
    """Both are acknowledged with versions of their own, and the alias points to one of them."""
    at_once = threading.Barrier(2)

    def deploy(adapter: str) -> httpx.Response:
        with service.client("acme") as http:
            files = adapter_files(stories_adapters[adapter])
            at_once.wait(10)
            return http.post("/deploy/contested", files=files)

    with ThreadPoolExecutor(2) as pool:
        replies = list(pool.map(deploy, ("pirate", "winter")))
    assert [reply.status_code for reply in replies] == [201, 201]
    assert {reply.json()["version"] for reply in replies} == {1, 2}
    with service.client("acme") as http:
        found = http.get("/functions/contested").json()
        assert [entry["version"] for entry in found["versions"]] == [1, 2]
        called = http.post("/invoke/contested", json=GREEDY).json()
        digests = {reply.json()["version"]: reply.json()["digest"] for reply in replies}
        assert called["version"] == found["aliases"]["latest"]
        assert called["digest"] == digests[called["version"]]
        assert http.delete("/functions/contested").status_code == 204


def test_client_that_vanishes_mid_stream(service: Service) -> None:
    """The fixture checks that the engine then holds nothing."""
    long = {**GREEDY, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with service.client("acme") as http, http.stream("POST", "/invoke/dragon", json=long) as reply:
        lines = reply.iter_lines()
        next(lines)
        assert eventually(lambda: service.node()["running"] == 1), service.node()
    assert eventually(service.nothing_held), service.node()


def test_openai_client_unchanged(service: Service) -> None:
    key = service.credentials["keys"]["acme"]
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key=key, max_retries=0) as client:
        asked = {"model": "dragon", "prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}
        whole = client.completions.create(**asked)
        pieces = [chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True) if chunk.choices]
        assert "".join(pieces) == whole.choices[0].text
        assert {model.id for model in client.models.list()} >= {"stories260K", "dragon"}
        with pytest.raises(openai.BadRequestError, match="chat template"):
            client.chat.completions.create(model="dragon", messages=[{"role": "user", "content": "Hello"}])
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="nobody", prompt="x")


def test_own_client(service: Service, stories_adapters: dict[str, Path]) -> None:
    with garnish.Client(service.url, service.credentials["keys"]["globex"]) as client:
        deployed = client.deploy("robot", stories_adapters["robot"], alias="prod")
        assert client.deploy("robot", stories_adapters["robot"], dry_run=True).digest == deployed.digest
        assert [item.name for item in client.functions().functions] == ["robot"]
        whole = client.invoke("robot:prod", "Once upon a time", max_tokens=24, temperature=0)
        *tokens, done = client.invoke("robot:1", "Once upon a time", stream=True, max_tokens=24, temperature=0)
        assert "".join(token.text for token in tokens) == whole.output.text
        assert done.digest == whole.digest == deployed.digest
        with pytest.raises(garnish.GarnishError) as refused:
            client.invoke("robot", "x", max_tokens=0)
        assert (refused.value.type, refused.value.param, refused.value.status) == (
            "validation_failed",
            "max_tokens",
            422,
        )
        client.delete("robot")
        with pytest.raises(garnish.GarnishError, match="not_found"):
            client.function("robot")


def test_own_async_client(service: Service) -> None:
    async def talk() -> tuple[str, str]:
        async with garnish.AsyncClient(service.url, service.credentials["keys"]["acme"]) as client:
            whole = await client.invoke("dragon", "Once upon a time", max_tokens=24, temperature=0)
            stream = await client.invoke("dragon", "Once upon a time", stream=True, max_tokens=24, temperature=0)
            return whole.output.text, "".join([event.text async for event in stream if hasattr(event, "text")])

    whole, streamed = asyncio.run(talk())
    assert whole == streamed != ""


def test_command_line(service: Service, stories_adapters: dict[str, Path]) -> None:
    here = ["--state", "state"]
    deployed = service.run("deploy", "winter", str(stories_adapters["winter"]), *here, "--json")
    assert json.loads(deployed.stdout)["version"] == 1
    whole = service.run("invoke", "winter", "Once upon a time", "--max-tokens", "24", "--temperature", "0", *here)
    streamed = service.run(
        "invoke", "winter", "-", "--max-tokens", "24", "--temperature", "0", "--stream", "--timing", *here,
        text="Once upon a time",
    )  # fmt: skip
    assert whole.stdout == streamed.stdout != ""
    assert "cold start: none" in streamed.stderr
    listed = service.run("list", *here)
    assert "winter\tlatest=1\t32\t" in listed.stdout
    described = json.loads(service.run("describe", "winter", *here, "--json").stdout)
    assert described["aliases"] == {"latest": 1}
    assert service.run("delete", "winter", *here).returncode == 0
    gone = service.run("describe", "winter", *here)
    assert (gone.returncode, gone.stdout) == (1, "")
    assert gone.stderr == "garnish: not_found: there is no function 'winter'\n"


def test_command_line_tells_every_problem(service: Service, stories_adapters: dict[str, Path], tmp_path: Path) -> None:
    shutil.copy(stories_adapters["dragon"] / CONFIG_FILE, tmp_path)
    tensors = load_file(stories_adapters["dragon"] / WEIGHTS_FILE)
    halves = {name: tensor for name, tensor in tensors.items() if "lora_A" in name}
    nowhere = {"base_model.model.nowhere.lora_A.weight": next(iter(halves.values())).clone()}
    save_file(halves | nowhere, tmp_path / WEIGHTS_FILE)
    wrong = service.run("deploy", "wrong", str(tmp_path), "--state", "state", "--dry-run")
    first, *details = wrong.stderr.splitlines()[-3:]
    assert wrong.returncode == 1
    assert any("garnish: validation_failed" in line for line in wrong.stderr.splitlines())
    assert "lora_B" in first
    assert details[-1].startswith("  and ")


def test_command_line_tells_another_base_in_one_line(service: Service, smollm_adapters: dict[str, Path]) -> None:
    wrong = service.run("deploy", "wrong", str(smollm_adapters["pirate"]), "--state", "state", "--dry-run")
    *_, told = wrong.stderr.splitlines()
    assert wrong.returncode == 1
    assert told.startswith("garnish: validation_failed")
    assert "trained for another base model" in told


def test_logs_tell_nothing_of_what_was_sent(service: Service) -> None:
    """Of gateway and node, over calls that succeed and that are refused."""
    mark = "marked prompt 7f3a"
    with service.client("acme") as http:
        for body in ({"max_tokens": 2}, {"max_tokens": 2, "stop": [mark]}, {"max_tokens": 0}, {"unknown": mark}):
            http.post("/invoke/dragon", json={"prompt": mark, **body})
        http.post("/invoke/dragon", json={"prompt": mark * 500})
        http.post("/invoke/dragon", content=mark)
    keys = [*service.credentials["keys"].values(), service.credentials["admin_key"]]
    logs = [log.read_text() for log in service.state.glob("logs/*")]
    assert len(logs) >= 2
    for text in logs:
        assert mark not in text
        assert not any(key[-20:] in text for key in keys)


def test_what_an_earlier_call_left_computed_is_told(service: Service) -> None:
    body = {**GREEDY, "prompt": "Once upon a time there was a little dog who had a drawn cache all for himself"}
    with service.client("acme") as client:
        replies = [client.post("/invoke/stories260K", json=body).raise_for_status().json() for _ in range(2)]
    first, second = (reply["usage"] for reply in replies)
    assert first["cached_tokens"] == 0
    assert second["cached_tokens"] == (second["prompt_tokens"] - 1) // 16 * 16 > 0
    assert replies[0]["output"] == replies[1]["output"]
    metrics = httpx.get(f"{service.url}/metrics", headers=service.headers(), timeout=60).text
    told = [line for line in metrics.splitlines() if 'kind="cached_prompt"' in line]
    assert sum(float(line.split()[-1]) for line in told) >= second["cached_tokens"]
