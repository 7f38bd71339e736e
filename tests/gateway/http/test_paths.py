"""Paths with slashes too many, and the small routes that clients and browsers ask first."""

from __future__ import annotations

from importlib.metadata import version

import openai
import pytest
from raw_http import send
from running_gateway import Running, plain_client


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions/", "//v1/chat/completions", "/v1//chat/completions", "/v1/chat//completions//"]
)
def test_slashes_too_many_change_nothing(shared_gateway: Running, path: str) -> None:
    """stories260K has no chat template, which the route of chats says, in OpenAI's form."""
    body = b'{"model": "stories260K", "messages": [{"role": "user", "content": "x"}]}'
    head = f"POST {path} HTTP/1.1\nhost: x\nx-api-key: {shared_gateway.keys['acme']}\ncontent-length: {len(body)}"
    status, reply = send(shared_gateway.url, f"{head}\ncontent-type: application/json", body)
    assert (status, reply["error"]["param"]) == (400, "messages")


def test_a_base_url_with_a_slash_works_in_the_official_client(shared_gateway: Running) -> None:
    for base_url in (f"{shared_gateway.url}/v1/", f"{shared_gateway.url}//v1"):
        with openai.OpenAI(base_url=base_url, api_key=shared_gateway.keys["acme"], max_retries=0) as client:
            assert next(iter(client.models.list())).id == "stories260K"
            assert client.completions.create(model="stories260K", prompt="x", max_tokens=1).choices[0].text == " t0"


def test_names_end_where_the_path_does(shared_gateway: Running) -> None:
    client = shared_gateway.client()
    assert client.post("/invoke/stories260K/", json={"prompt": "x", "max_tokens": 1}).status_code == 200
    assert client.get("/v1/models/stories260K/").json()["id"] == "stories260K"
    assert client.get("/healthz/").status_code == 200


def test_pages_with_a_slash_lead_to_the_page(shared_gateway: Running) -> None:
    """Their links are relative, and would lead nowhere from there."""
    with plain_client(shared_gateway.url) as client:
        for page in ("console", "docs"):
            reply = client.get(f"/{page}/")
            assert (reply.status_code, reply.headers["location"]) == (308, f"../{page}")
            assert str(reply.next_request.url) == f"{shared_gateway.url}/{page}" if reply.next_request else False


def test_the_front_names_what_is_here(shared_gateway: Running) -> None:
    with plain_client(shared_gateway.url) as client:
        front = client.get("/").json()
        assert (front["name"], front["version"]) == ("garnish", version("garnish"))
        assert client.get("/", headers={"accept": "application/json"}).json() == front
        for name, path in front["links"].items():
            assert client.get(path).status_code == (401 if name == "models" else 200), path


def test_what_vllms_and_sagemakers_clients_ask_first(shared_gateway: Running) -> None:
    with plain_client(shared_gateway.url) as client:
        assert client.get("/version").json() == {"version": version("garnish")}
        assert client.get("/ping").status_code == 200
