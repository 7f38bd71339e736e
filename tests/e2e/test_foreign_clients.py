"""What `vllm bench serve` 0.32 and guidellm 0.8.1 sent, sent again to a whole service: the answers are what they read.

data/foreign_clients.jsonl has the first request of each kind and function that `benchmarks.clients.foreign_clients
--record` wrote.
"""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from whole_service import MakeService, Service

LINES = (Path(__file__).parent / "data" / "foreign_clients.jsonl").read_text().splitlines()
REQUESTS: list[dict[str, Any]] = [json.loads(line) for line in LINES]
CALLS = [request for request in REQUESTS if request["path"].startswith("/v1/")]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<answer>"
WITHOUT_KEY = {"/tokenize": 401, "/metrics": 401}
"""`vllm bench serve` sends no key there, and goes on without an answer."""


@pytest.fixture(scope="module")
def service(
    make_service: MakeService,
    stories_dir: Path,
    stories_adapters: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Service:
    """stories260K under the name of the demo's base, which the requests have, with their eight functions."""
    model = tmp_path_factory.mktemp("base") / "SmolLM2-135M-Instruct"
    shutil.copytree(stories_dir, model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    adapters = sorted(stories_adapters.values())
    declared = {
        f"a{number}": {"tenant": "acme", "adapter": str(adapters[number % len(adapters)])} for number in range(8)
    }
    return make_service(model, declared, ("acme",)).start()


def send(service: Service, request: dict[str, Any]) -> httpx.Response:
    headers = service.headers("acme") if request["key"] else {}
    url = service.url + request["path"]
    return httpx.request(request["method"], url, json=request["body"], headers=headers, timeout=120)


def events(reply: httpx.Response) -> list[dict[str, Any]]:
    """Of a stream, which ends as OpenAI's do."""
    assert reply.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_the_requests_are_of_each_client_and_function() -> None:
    clients = {"vllm-completions", "vllm-chat", "guidellm-completions", "guidellm-chat"}
    assert {request["client"] for request in CALLS} == clients
    assert {request["body"]["model"] for request in CALLS} == {f"a{number}" for number in range(8)}


def test_every_call_streams_text_and_usage(service: Service) -> None:
    """All at once, as the clients send them. vLLM's counts what has choices, then reads the usage; guidellm reads the
    usage of the last chunk that has one."""
    with ThreadPoolExecutor(len(CALLS)) as pool:
        replies = list(pool.map(lambda request: send(service, request), CALLS))
    for request, reply in zip(CALLS, replies, strict=True):
        assert reply.status_code == 200, (request, reply.text)
        chunks, body = events(reply), request["body"]
        assert all(chunk["id"] == chunks[0]["id"] and chunk["model"] == body["model"] for chunk in chunks)
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
        chat = "messages" in body
        assert "".join(choice["delta"].get("content", "") if chat else choice["text"] for choice in choices)
        assert choices[-1]["finish_reason"] == "length" or not body.get("ignore_eos")
        usage = chunks[-1]["usage"]
        assert chunks[-1]["choices"] == []
        wanted = body["max_completion_tokens"] if chat else body["max_tokens"]
        assert 0 < usage["completion_tokens"] <= wanted
        assert usage["completion_tokens"] == wanted or not body.get("ignore_eos")
        assert usage["prompt_tokens"] > 0
        if body["stream_options"].get("continuous_usage_stats"):
            assert all(chunk["usage"] for chunk in chunks)


def test_what_else_they_ask(service: Service) -> None:
    others = [request for request in REQUESTS if request not in CALLS]
    assert {request["path"] for request in others} >= {"/health", "/tokenize"}
    for request in others:
        reply = send(service, request)
        expected = 200 if request["path"] == "/health" else WITHOUT_KEY[request["path"]]
        assert reply.status_code == expected, (request, reply.text)
        if request["path"] == "/tokenize":  # with a key it is aligned with the server's tokenizer
            with_key = send(service, {**request, "key": True}).json()
            assert with_key["count"] == len(with_key["tokens"]) > 0


def test_the_first_model_and_its_tokenizer(service: Service) -> None:
    """Without `--model`, vLLM's takes the first model's id, and its `root` as the tokenizer."""
    first, *functions = service.client("acme").get("/v1/models").json()["data"]
    assert (first["id"], first["root"], first["max_model_len"]) == ("SmolLM2-135M-Instruct",) * 2 + (512,)
    assert sorted(model["id"] for model in functions) == [f"a{number}" for number in range(8)]
