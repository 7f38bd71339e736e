"""The tokenizer's files beside an adapter: what they say becomes the version's defaults, with a line that says so."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from running_gateway import Running, upload
from transformers import AutoTokenizer

from adapters.functions import MAX_OWN_TEMPLATES, MAX_TEMPLATE
from cluster.text import BaseText
from garnish.client import Client
from garnish.credentials import Connection

CASE = Path(__file__).parents[1] / "data" / "adapter_own_template"
TEMPLATE, SETTINGS = "chat_template.jinja", "tokenizer_config.json"
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def gateway(reused: Running) -> Running:
    return reused


@pytest.fixture
def client(gateway: Running) -> httpx.Client:
    return gateway.client()


def beside(files: dict[str, Any], template: str | None = None, **settings: Any) -> dict[str, Any]:
    found = dict(files)
    if template is not None:
        found[TEMPLATE] = (TEMPLATE, template.encode())
    if settings:
        found[SETTINGS] = (SETTINGS, json.dumps(settings).encode())
    return found


def warnings(reply: httpx.Response) -> str:
    assert reply.status_code in (200, 201), reply.text
    return "\n".join(reply.json()["warnings"])


def tokens(client: httpx.Client, model: str) -> Any:
    return client.post("/tokenize", json={"model": model, "messages": MESSAGES}).json().get("tokens")


def test_a_folder_with_its_own_template_is_deployed_by_the_client(
    gateway: Running, client: httpx.Client, stories_adapters: dict[str, Path], tmp_path: Path
) -> None:
    for file in (*stories_adapters["pirate"].iterdir(), *CASE.iterdir()):
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with Client(connection=Connection(gateway.url, gateway.keys["acme"], gateway.tenants["acme"])) as official:
        reply = official.deploy("f", tmp_path)
    told = "\n".join(reply.warnings)
    assert "use the adapter's chat template, unless defaults.chat_template is set" in told
    assert "end token '<|im_end|>' is not in the base's vocabulary" in told
    assert "tokens that the base's lacks ('<|im_end|>')" in told
    reference = AutoTokenizer.from_pretrained(gateway.config.model_dir)
    expected = reference.apply_chat_template(
        MESSAGES, chat_template=(CASE / TEMPLATE).read_text(), add_generation_prompt=True, return_dict=False
    )
    assert tokens(client, "f") == expected
    assert client.get("/functions/f/versions/1").json()["warnings"] == list(reply.warnings)
    assert client.get("/functions/f").json()["policy"] == {}, "the version's, not the function's"


def test_each_version_has_its_own_and_the_function_s_has_priority(
    gateway: Running, client: httpx.Client, pirate: dict, stories_adapters: dict[str, Path]
) -> None:
    text = BaseText(Path(gateway.config.model_dir))
    token = text.tokenizer.id_to_token(300)
    assert "end with the adapter's end token" in warnings(
        client.post("/deploy/f", files=beside(pirate, "one{{ messages[0].content }}", eos_token={"content": token}))
    )
    dragon = upload(stories_adapters["dragon"])
    assert warnings(client.post("/deploy/f", files=beside(dragon, "two"), data={"alias": "beta"}))
    plain = lambda written: text.encode_rendered(written)  # noqa: E731
    assert tokens(client, "f") == plain("oneHi")
    assert tokens(client, "f:beta") == plain("two")
    chat = {"messages": MESSAGES, "max_tokens": 1}
    assert client.post("/v1/chat/completions", json={"model": "f", **chat}).status_code == 200
    (node,) = gateway.nodes
    assert node.received[-1].token_ids == plain("oneHi")
    assert node.received[-1].sampling.stop_token_ids == [300]
    assert client.post("/v1/chat/completions", json={"model": "f:beta", **chat}).status_code == 200
    assert node.received[-1].sampling.stop_token_ids == []
    own = {"chat_template": "three", "stop_token_ids": [7]}
    assert client.patch("/functions/f", json={"defaults": own}).status_code == 200
    assert client.post("/v1/chat/completions", json={"model": "f", **chat}).status_code == 200
    assert node.received[-1].token_ids == plain("three")
    assert node.received[-1].sampling.stop_token_ids == [7]
    assert client.patch("/functions/f", json={"defaults": None}).status_code == 200
    assert not warnings(client.post("/deploy/f", files=pirate)), "the same adapter, without a template"
    assert tokens(client, "f") is None


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (lambda files: beside(files, "{% for %}"), "chat template is not used: line 1"),
        (lambda files: beside(files, "{{ raise_exception('no') }}"), "chat template is not used: no"),
        (lambda files: beside(files, "x" * (MAX_TEMPLATE + 1)), "characters; 32768 are allowed"),
        (lambda files: {**files, SETTINGS: (SETTINGS, b"{")}, "tokenizer_config.json is not used"),
        (lambda files: beside(files, chat_template="{{ messages[0].content }}"), "use the adapter's chat template"),
        (
            lambda files: beside(files, chat_template=[{"name": "default", "template": "x"}]),
            "use the adapter's chat template",
        ),
        (lambda files: beside(files, eos_token="</s>", bos_token="<s>"), ""),
        (lambda files: beside(files, added_tokens_decoder={"1": {"content": "<s>"}}), ""),
        (
            lambda files: beside(files, added_tokens_decoder={str(i): {"content": f"<{i}>"} for i in range(600, 609)}),
            "'<604>' and 4 more",
        ),
    ],
)
def test_what_can_not_be_taken_over_is_named(
    client: httpx.Client, pirate: dict, files: Callable[[dict], dict], told: str
) -> None:
    dry = warnings(client.post("/deploy/f?dry_run=true", files=files(pirate)))
    assert told in dry and bool(told) == bool(dry)
    assert warnings(client.post("/deploy/f", files=files(pirate))) == dry


def test_templates_of_versions_are_bounded(client: httpx.Client, pirate: dict) -> None:
    def files(number: int) -> dict[str, Any]:
        config = json.loads(pirate["adapter_config.json"][1]) | {"lora_alpha": number + 1}
        return beside(
            {**pirate, "adapter_config.json": ("adapter_config.json", json.dumps(config).encode())}, f"{number}"
        )

    for number in range(MAX_OWN_TEMPLATES):
        assert client.post("/deploy/f", files=files(number)).status_code == 201
    refused = client.post("/deploy/f", files=files(MAX_OWN_TEMPLATES))
    assert (refused.status_code, refused.json()["error"]["type"]) == (409, "conflict")
    assert client.delete("/functions/f/versions/1").status_code == 204
    assert client.post("/deploy/f", files=files(MAX_OWN_TEMPLATES)).status_code == 201
