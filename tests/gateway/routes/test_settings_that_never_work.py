"""What can never work is refused when it is set: in a policy, at a deploy, in a call, and in a tenant's settings."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest
from running_gateway import Running

CALL = {"prompt": "x", "max_tokens": 1, "background": True}
NEVER: list[tuple[dict[str, Any], str]] = [
    ({"on_success": {"webhook": "https://nowhere.example/hook"}}, "on_success.webhook"),
    ({"on_failure": {"webhook": "https://nowhere.example/hook"}}, "on_failure.webhook"),
    ({"on_success": {"webhook": "http://127.0.0.1/hook"}}, "on_success.webhook"),
    ({"on_success": {"webhook": "https://hooks.acme.example:0/"}}, "on_success.webhook"),
    ({"on_success": {"function": "unknown"}}, "on_success.function"),
    ({"on_failure": {"function": "pirate:unknown"}}, "on_failure.function"),
    ({"on_failure": {"function": "pirate:9"}}, "on_failure.function"),
    ({"on_success": {"function": "theirs"}}, "on_success.function"),
]
"""Destinations, and the field that is wrong."""


@pytest.fixture
def gateway(reused: Running, pirate: dict[str, Any]) -> Running:
    tenant = reused.tenants["acme"]
    hosts = {"webhook_hosts": ["hooks.acme.example"]}
    reused.client("admin").put(f"/tenants/{tenant}", json=hosts).raise_for_status()
    reused.client("other").post("/deploy/theirs", files=pirate).raise_for_status()
    reused.client("acme").post("/deploy/pirate", files=pirate).raise_for_status()
    return reused


def problem(reply: httpx.Response) -> tuple[int, str]:
    assert reply.status_code == 422, reply.text
    return reply.status_code, reply.json()["error"]["param"]


@pytest.mark.parametrize(("policy", "param"), NEVER)
def test_destinations_that_are_never_reached(
    policy: dict[str, Any], param: str, gateway: Running, pirate: dict[str, Any]
) -> None:
    client = gateway.client()
    assert problem(client.patch("/functions/pirate", json=policy)) == (422, param)
    assert client.get("/functions/pirate").json()["policy"] == {}
    form = pirate | {"policy": ("policy", msgspec.json.encode(policy))}
    for dry_run in ("true", "false"):
        reply = client.post("/deploy/new", files=form, params={"dry_run": dry_run})
        assert problem(reply) == (422, f"policy.{param}")
    assert client.get("/functions/new").status_code == 404
    assert problem(client.post("/invoke/pirate", json=CALL | policy)) == (422, param)


def test_destinations_that_may_be_reached_are_accepted(gateway: Running, pirate: dict[str, Any]) -> None:
    client = gateway.client()
    for policy in (
        {"on_success": {"webhook": "https://hooks.acme.example/done"}},
        {"on_failure": {"function": "pirate:latest"}, "on_success": {"function": "pirate:1"}},
        {"on_success": {"function": "pirate"}},
        {"on_success": None, "on_failure": None},
    ):
        assert client.patch("/functions/pirate", json=policy).status_code == 200
    for own in ("self", "self:canary", "self:latest", "pirate"):
        policy = msgspec.json.encode({"on_success": {"function": own}})
        form = pirate | {"policy": ("policy", policy), "alias": (None, "canary")}
        reply = client.post("/deploy/self", files=form)
        assert reply.status_code == 201, reply.text
        client.delete("/functions/self").raise_for_status()


def test_a_function_may_be_deleted_while_a_policy_names_it(gateway: Running, pirate: dict[str, Any]) -> None:
    """Calls are still accepted: their destination is tried, and may be deployed again."""
    client = gateway.client()
    client.post("/deploy/next", files=pirate).raise_for_status()
    client.patch("/functions/pirate", json={"on_success": {"function": "next"}}).raise_for_status()
    client.delete("/functions/next").raise_for_status()
    assert client.post("/invoke/pirate", json=CALL).status_code == 202


def test_a_timeout_that_no_call_may_have(start: Any, pirate: dict[str, Any]) -> None:
    running = start(max_timeout=60.0, request_timeout=30.0)
    node, client = running.node(), running.client()
    client.post("/deploy/f", files=pirate).raise_for_status()
    assert problem(client.patch("/functions/f", json={"timeout": 61})) == (422, "timeout")
    client.patch("/functions/f", json={"timeout": 60}).raise_for_status()
    client.post("/invoke/f", json={"prompt": "x", "max_tokens": 1}).raise_for_status()
    assert node.received[-1].timeout <= 60


@pytest.mark.parametrize("host", ["bücher.example", "*.bücher.example", "https://a.example", "a.example:443", "a."])
def test_hosts_that_no_webhook_has(host: str, reused: Running) -> None:
    path = f"/tenants/{reused.tenants['acme']}"
    assert problem(reused.client("admin").put(path, json={"webhook_hosts": [host]})) == (422, "webhook_hosts")


@pytest.mark.parametrize(
    ("target", "status"),
    [({"version": 2}, 404), ({"weights": {"1": 0.5, "2": 0.5}}, 404), ({"weights": {"1": 0.5}}, 422)],
)
def test_aliases_of_versions_that_do_not_exist(target: dict[str, Any], status: int, gateway: Running) -> None:
    assert gateway.client().put("/functions/pirate/aliases/canary", json=target).status_code == status


def test_warm_windows_that_never_open(gateway: Running) -> None:
    window = {"cron": "0 0 30 2 *", "for": 3600}
    assert problem(gateway.client().patch("/functions/pirate", json={"warm": [window]})) == (422, "warm[0].cron")
