"""Drawn requests to every documented route: each answer has a documented status and the documented form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from running_gateway import Running, plain_client

from gateway.residency import warm_on_deploy
from gateway.routes.openapi import document

DOCUMENT = document()
OPERATIONS = [(method, path) for path, item in DOCUMENT["paths"].items() for method in item]

NAMES = st.sampled_from(["f", "pirate", "pirate:latest", "pirate:1", "stories260K", "..", "a" * 70]) | st.text(
    max_size=5
)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=4)
)
ANY = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner), max_leaves=4
)
GOOD: dict[str, Any] = {
    "prompt": "Once",
    "messages": [{"role": "user", "content": "Hi"}],
    "model": "pirate",
    "max_tokens": 3,
    "temperature": 0.5,
    "stop": ["x"],
    "logprobs": 1,
    "n": 2,
    "seed": 1,
    "timeout": 30,
}


@st.composite
def bodies(draw: st.DrawFn, fields: list[str]) -> dict[str, Any]:
    """Mostly right: each field is absent, good, or anything."""
    body = {}
    for field in fields:
        kind = draw(st.integers(0, 9))
        if field in GOOD and kind < 4:
            body[field] = GOOD[field]
        elif kind == 4:
            body[field] = draw(ANY)
    if draw(st.integers(0, 9)) == 0:
        body[draw(st.text(max_size=4))] = draw(ANY)
    body.pop("stream", None)  # an event stream has no JSON to compare
    return body


@pytest.fixture(scope="module")
def validators() -> dict[str, Draft202012Validator]:
    """A validator per message type."""
    schemas = DOCUMENT["components"]["schemas"]
    return {
        f"#/components/schemas/{name}": Draft202012Validator(
            {"$ref": f"#/components/schemas/{name}", "components": {"schemas": schemas}}
        )
        for name in schemas
    }


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    """What is drawn to be warm first is not waited for as long as the client waits for its answer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warm_on_deploy, "WARM_SECONDS", 0.1)
        yield


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_answers_are_as_documented(
    deployed: Running,
    pirate: dict,
    validators: dict[str, Draft202012Validator],
    method: str,
    path: str,
    data: st.DataObject,
) -> None:
    operation = DOCUMENT["paths"][path][method]
    url, params = path, {}
    for parameter in operation["parameters"]:
        if parameter["in"] == "path":
            value = data.draw(NAMES)
            url = url.replace("{" + parameter["name"] + "}", quote(value, safe=":") or "%20")
        elif parameter["in"] == "query" and data.draw(st.booleans()):
            params[parameter["name"]] = data.draw(st.sampled_from(["true", "false", "1", "latest", "x", ""]))
    sent: dict[str, Any] = {"params": params}
    if "requestBody" in operation:
        sent |= _drawn_body(data, operation["requestBody"]["content"], pirate)
    key = data.draw(st.sampled_from(["acme", "acme", "acme", "admin", None]))
    headers = {} if key is None else {"authorization": f"Bearer {deployed.keys[key]}"}
    if key == "admin" and data.draw(st.booleans()):
        headers["x-garnish-tenant"] = data.draw(st.sampled_from(["acme", "other", "nobody", "..", ""]))
    with plain_client(deployed.url) as client:
        reply = client.request(method.upper(), url, headers=headers, **sent)
    shortened = reply.url.raw_path.partition(b"?")[0].count(b"/") != path.count("/")  # the client resolves `..` itself
    if shortened or ("{" in path and reply.status_code in (404, 405)):
        return  # some drawn values make another path of it
    _check(reply, operation, validators)


def _drawn_body(data: st.DataObject, content: dict[str, Any], pirate: dict) -> dict[str, Any]:
    if "multipart/form-data" in content:
        chosen = {name: part for name, part in pirate.items() if data.draw(st.integers(0, 4))}
        return {"files": chosen or {"other": b"x"}}
    name = content["application/json"]["schema"]["$ref"].rpartition("/")[2]
    fields = list(DOCUMENT["components"]["schemas"][name]["properties"])
    return {"content": json.dumps(data.draw(bodies(fields)))}


def _check(reply: httpx.Response, operation: dict[str, Any], validators: dict[str, Draft202012Validator]) -> None:
    documented = operation["responses"]
    assert str(reply.status_code) in documented, (reply.status_code, reply.text)
    assert reply.status_code < 500
    content = documented[str(reply.status_code)].get("content")
    if content is None:
        assert reply.content == b""
        return
    kind = reply.headers["content-type"].partition(";")[0]
    assert kind in content
    if kind == "application/json":
        validators[content[kind]["schema"]["$ref"]].validate(reply.json())
