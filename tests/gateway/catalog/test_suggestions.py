"""What callers read who mistyped a name."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import openai
import pytest
from running_gateway import Running

from adapters.errors import NoSuchFunction, StoreUnavailable
from gateway.catalog.suggestions import KEPT_FACTOR, MAX_PER_SECOND, Suggestions
from gateway.catalog.threads import StoreThreads


@pytest.fixture
def gateway(reused: Running) -> Running:
    return reused


def message(reply: httpx.Response) -> str:
    assert reply.status_code == 404, reply.text
    text: str = reply.json()["error"]["message"]
    return text


@pytest.fixture
def client(gateway: Running, pirate: dict[str, Any]) -> httpx.Client:
    made = gateway.client()
    assert made.post("/deploy/pirate", files=pirate).status_code == 201
    assert made.put("/functions/pirate/aliases/stable", json={"version": 1}).status_code == 200
    return made


MEANT = "there is no function 'pirat'; did you mean 'pirate'?"


@pytest.mark.parametrize(
    ("method", "path", "body", "expected"),
    [
        ("POST", "/invoke/pirat", {"prompt": "x"}, MEANT),
        ("POST", "/v1/completions", {"model": "pirat", "prompt": "x"}, MEANT),
        ("POST", "/tokenize", {"model": "pirat:stable", "prompt": "x"}, MEANT),
        ("GET", "/v1/models/pirat", None, MEANT),
        ("GET", "/functions/pirat", None, MEANT),
        ("PUT", "/functions/pirat/aliases/a", {"version": 1}, MEANT),
        ("DELETE", "/functions/pirat", None, MEANT),
        ("POST", "/invoke/Pirate", {"prompt": "x"}, "there is no function 'Pirate'; did you mean 'pirate'?"),
        (
            "POST",
            "/invoke/storie260K",
            {"prompt": "x"},
            "there is no function 'storie260K'; did you mean 'stories260K'?",
        ),
        ("GET", "/functions/storie260K", None, "there is no function 'storie260K'"),  # the base is no function
        ("GET", "/v1/models/nobody", None, "there is no function 'nobody'"),
        (
            "POST",
            "/invoke/pirate:stabel",
            {"prompt": "x"},
            "function pirate has no version or alias 'stabel'; did you mean 'stable'?",
        ),
        (
            "GET",
            "/functions/pirate/aliases/lates",
            None,
            "function pirate has no alias 'lates'; did you mean 'latest'?",
        ),
        (
            "POST",
            "/functions/pirate/rollback",
            {"alias": "stabl"},
            "function pirate has no alias 'stabl'; did you mean 'stable'?",
        ),
    ],
)
def test_the_nearest_name(client: httpx.Client, method: str, path: str, body: Any, expected: str) -> None:
    """On /v1 it stands behind OpenAI's sentence, which frameworks look for."""
    found = message(client.request(method, path, json=body))
    assert found == expected or (
        path.startswith("/v1/") and found.endswith(f" you do not have access to it. ({expected})")
    )


def test_other_tenants_and_deleted_functions_are_not_named(client: httpx.Client, gateway: Running) -> None:
    assert message(gateway.client("other").get("/functions/pirat")) == "there is no function 'pirat'"
    assert client.delete("/functions/pirate").status_code == 204
    assert message(client.get("/functions/pirat")) == "there is no function 'pirat'"


def test_openais_client_shows_it(client: httpx.Client, gateway: Running) -> None:
    with (
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=gateway.keys["acme"], max_retries=0) as official,
        pytest.raises(openai.NotFoundError, match="did you mean 'pirate'"),
    ):
        official.models.retrieve("pirat")


def test_a_mistyped_query_parameter(client: httpx.Client) -> None:
    error = client.get("/functions?limt=3").json()["error"]
    assert error["message"] == "unknown query parameter 'limt'; did you mean 'limit'?"


@pytest.mark.parametrize(
    ("path", "body", "param", "meant"),
    [
        ("/invoke/pirate", {"prompt": "x", "max_token": 3}, "max_token", "max_tokens"),
        ("/invoke/pirate", {"messages": [{"rol": "user", "content": "x"}]}, "messages[...].rol", "role"),
        ("/v1/completions", {"model": "pirate", "promt": "x"}, "promt", "prompt"),
        (
            "/v1/completions",
            {"model": "pirate", "prompt": "x", "stream": True, "stream_options": {"include_usages": True}},
            "stream_options.include_usages",
            "include_usage",
        ),
        (
            "/v1/chat/completions",
            {"model": "pirate", "messages": [{"role": "user", "content": [{"txt": "x"}]}]},
            "messages[...].content[...].txt",
            "text",
        ),
        ("/tokenize", {"prompt": "x", "return_token_str": True}, "return_token_str", "return_token_strs"),
        ("/functions/pirate/rollback", {"allias": "x"}, "allias", "alias"),
        ("/functions/pirate/rollback", {"surprise": "x"}, "surprise", None),
    ],
)
def test_a_mistyped_field(client: httpx.Client, path: str, body: Any, param: str, meant: str | None) -> None:
    error = client.post(path, json=body).json()["error"]
    assert error["param"].replace("[0]", "[...]") == param
    hint = f"; did you mean {meant!r}?" if meant else ""
    assert error["message"] == f"Object contains unknown field `{param.rpartition('.')[2]}`{hint}"


class Names:
    """A registry of 40,000 names, which counts what it is asked."""

    def __init__(self, base: Any) -> None:
        self.base = base
        self.lists = self.reads = 0
        self.fails = False
        self._names = sorted(f"customer-{number:05d}" for number in range(40_000))

    def names(self, tenant: str, after: str = "") -> Sequence[str]:
        if self.fails:
            raise StoreUnavailable("away")
        self.lists += 1
        return [name for name in self._names if name > after][:1000]

    def function(self, tenant: str, name: str) -> None:
        self.reads += 1


@pytest.fixture
def names(gateway: Running) -> Names:
    return Names(gateway.base)


def ask(names: Names, clock: Callable[[], float], tenant_calls: Sequence[str]) -> list[str]:
    async def main() -> list[str]:
        suggestions: Any = Suggestions(names, StoreThreads(60.0), clock)  # type: ignore[arg-type]
        errors = [NoSuchFunction(tenant, "customer-0123x4") for tenant in tenant_calls]
        return [str(await suggestions.add_to(error, with_base=True)) for error in errors]

    return asyncio.run(main())


def test_a_flood_of_unknown_names_is_not_worth_much(names: Names) -> None:
    """Names are listed once, and suggested a few times a second. Each look at this clock takes a millisecond."""
    now = itertools.count()
    told = ask(names, lambda: next(now) / 1000, ["acme"] * 50)
    assert (names.lists, names.reads) == (41, MAX_PER_SECOND)
    assert [text.endswith("did you mean 'customer-01234'?") for text in told] == [True] * MAX_PER_SECOND + [False] * 45


def test_names_are_listed_again_when_that_costs_little(names: Names) -> None:
    """Each look at this clock takes a second, so the list of names takes one and is kept for twenty."""
    now = itertools.count()
    ask(names, lambda: float(next(now)), ["acme"] * int(2.5 * KEPT_FACTOR))
    assert 41 * 2 <= names.lists <= 41 * 6


def test_a_registry_that_fails_costs_the_suggestion_alone(names: Names) -> None:
    names.fails = True
    assert ask(names, lambda: 1000.0, ["acme"]) == ["there is no function 'customer-0123x4'"]
