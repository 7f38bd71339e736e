"""What /usage says of drawn calls is the sum of what their replies said."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from command_line import CommandLine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from running_gateway import Running, upload
from stub_node import DEVICE_SECONDS, die_after_first, die_at_once, hang_after_first, refuse_for_good

from adapters.local_store import LocalStore
from garnish.client import Client
from gateway.leader.tick import Tick
from gateway.prices import Prices
from gateway.usage.compaction import compact_tenant
from gateway.usage.hours import HOUR, hour_name
from gateway.usage.objects import usage_key
from tests.support.draws import draws

NUMBERS = ("requests", "prompt_tokens", "completion_tokens")

call = st.fixed_dictionaries(
    {
        "tenant": st.sampled_from(["acme", "other"]),
        "target": st.sampled_from(["f", "f:1", "f:2", "g", "base", "nobody"]),
        "route": st.sampled_from(["invoke", "prompts", "choices"]),
        "stream": st.booleans(),
        "prompts": st.lists(st.text("abc ", max_size=20), min_size=1, max_size=3),
        "n": st.integers(1, 3),
        "max_tokens": st.integers(1, 12),
    }
)


@pytest.fixture
def deployed(gateway: Running, stories_adapters: dict[str, Path]) -> Running:
    first, second = (upload(stories_adapters[name]) for name in sorted(stories_adapters)[:2])
    for tenant in ("acme", "other"):
        client = gateway.client(tenant)
        for name, files in (("f", first), ("f", second), ("g", first)):
            assert client.post(f"/deploy/{name}", files=files).status_code == 201
    return gateway


def send(running: Running, drawn: dict[str, Any]) -> dict[str, int] | None:
    """What the reply says was used; None for an error."""
    target = running.base.id if drawn["target"] == "base" else drawn["target"]
    body: dict[str, Any] = {"max_tokens": drawn["max_tokens"], "stream": drawn["stream"]}
    path = f"/invoke/{target}"
    if drawn["route"] == "invoke":
        body["prompt"] = drawn["prompts"][0]
    else:
        path, body["model"], body["n"] = "/v1/completions", target, drawn["n"]
        body["prompt"] = drawn["prompts"] if drawn["route"] == "prompts" else drawn["prompts"][0]
        if drawn["stream"]:
            body["stream_options"] = {"include_usage": True}
    headers = {"authorization": f"Bearer {running.keys[drawn['tenant']]}"}
    reply = httpx.post(running.url + path, json=body, headers=headers, timeout=60, verify=False)
    if reply.status_code != 200:
        return None
    if not drawn["stream"]:
        return reply.json()["usage"]
    events = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: {")]
    return json.loads(events[-1])["usage"]


def usage(running: Running, key: str, **params: str) -> dict[str, Any]:
    reply = running.client(key).get("/usage", params=params)
    assert reply.status_code == 200, reply.text
    return reply.json()


def numbers(row: dict[str, Any]) -> Counter[str]:
    return Counter({name: row[name] for name in NUMBERS})


@settings(max_examples=draws(8), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=st.lists(call, min_size=1, max_size=12), groups=st.sets(st.sampled_from(["function", "version", "hour"])))
def test_sums_are_those_of_the_replies(deployed: Running, drawn: list[dict[str, Any]], groups: set[str]) -> None:
    before = {tenant: usage(deployed, tenant)["total"] for tenant in ("acme", "other")}
    expected: dict[str, Counter[str]] = {"acme": Counter(), "other": Counter()}
    for one in drawn:
        told = send(deployed, one)
        if told is not None:
            expected[one["tenant"]] += Counter({"requests": 1} | {name: told[name] for name in NUMBERS[1:]})
    for tenant, sums in expected.items():
        report = usage(deployed, tenant, group_by=",".join(groups))
        assert numbers(report["total"]) - numbers(before[tenant]) == +sums
        assert sum(map(numbers, report["rows"]), Counter()) == +numbers(report["total"])
        assert all((row[name] is None) for row in report["rows"] for name in {"tenant", "function", "hour"} - groups)
    whole = usage(deployed, "admin", group_by="tenant,version")
    assert numbers(whole["total"]) == +sum((numbers(usage(deployed, key)["total"]) for key in expected), Counter())
    by_tenant = {row["tenant"] for row in whole["rows"]}
    assert by_tenant <= {"acme", "other"}


def test_by_function_and_version(deployed: Running) -> None:
    acme, base = deployed.client("acme"), deployed.base.id
    for target in ("f", "f:1", "f", base, "g"):
        assert acme.post(f"/invoke/{target}", json={"prompt": "x", "max_tokens": 2}).status_code == 200
    rows = usage(deployed, "acme", group_by="version,function")["rows"]
    assert [(row["function"], row["version"], row["requests"], row["cold_starts"]) for row in rows] == [
        ("f", 1, 1, 1),
        ("f", 2, 2, 2),
        ("g", 1, 1, 1),
        (base, None, 1, 1),
    ]
    assert usage(deployed, "other")["rows"] == []
    assert usage(deployed, "admin", tenant="acme", group_by="")["rows"][0]["requests"] == 5
    assert usage(deployed, "admin", tenant="acme", to=str(int(time.time()) - 7200))["rows"] == []


@pytest.mark.parametrize("script", [die_at_once, die_after_first, refuse_for_good])
def test_failed_calls_cost_nothing(bare: Running, script: Any) -> None:
    running = bare
    running.node(script).go_on.set()
    assert running.client().post(f"/invoke/{running.base.id}", json={"prompt": "x"}).status_code >= 400
    body = {"model": running.base.id, "prompt": ["a", "b"]}
    assert running.client().post("/v1/completions", json=body).status_code >= 400
    assert usage(running, "acme")["rows"] == []


def test_a_call_that_its_caller_leaves_counts_as_far_as_it_came(bare: Running) -> None:
    running = bare
    node = running.node(hang_after_first)
    with running.client().stream("POST", f"/invoke/{running.base.id}", json={"prompt": "x", "stream": True}) as reply:
        assert next(reply.iter_lines()) == "event: token"
    assert node.disconnected.wait(30)
    for _ in range(500):
        rows = usage(running, "acme")["rows"]
        if rows:
            break
        time.sleep(0.01)
    prompt = len(node.received[0].token_ids)
    assert [(row["requests"], row["prompt_tokens"], row["completion_tokens"]) for row in rows] == [(1, prompt, 1)]


def test_who_may_ask_for_whom(deployed: Running) -> None:
    acme, admin = deployed.client("acme"), deployed.client("admin")
    assert deployed.client(None).get("/usage").status_code == 401
    for name in ("other", "nobody", "A"):
        reply = acme.get("/usage", params={"tenant": name})
        assert (reply.status_code, reply.json()["error"]["type"]) == (403, "forbidden")
        assert acme.get("/usage", headers={"x-garnish-tenant": name}).status_code == 403
    assert acme.get("/usage", params={"tenant": "acme"}).status_code == 200
    for name in ("nobody", "A", "../acme", ""):
        assert admin.get("/usage", params={"tenant": name}).status_code == 404
    both = admin.get("/usage", params={"tenant": "acme"}, headers={"x-garnish-tenant": "other"})
    assert both.status_code == 422
    assert acme.post(f"/invoke/{deployed.base.id}", json={"prompt": "x"}).status_code == 200
    assert admin.delete("/tenants/acme").status_code == 204
    assert admin.get("/usage", params={"tenant": "acme"}).json()["total"]["requests"] == 1, "kept for the bill"


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"from": "yesterday"}, "from"),
        ({"to": "99999999999"}, "to"),
        ({"to": "-1"}, "to"),
        ({"from": "2026-02-30"}, "from"),
        ({"from": "0"}, "from"),
        ({"to": "0"}, "from"),
        ({"from": "2026-11-02", "to": "2026-11-01"}, "from"),
        ({"group_by": "day"}, "group_by"),
        ({"other": "1"}, "other"),
    ],
)
def test_what_can_not_be_asked(reused: Running, params: dict[str, str], named: str) -> None:
    reply = reused.client().get("/usage", params=params)
    assert (reply.status_code, reply.json()["error"]["param"]) == (422, named)


@pytest.mark.parametrize(
    ("given_from", "given_to"),
    [
        ("2026-11-21T17:00Z", "2026-11-21T19:00:00+00:00"),
        ("2026-11-21T17:59:59", "2026-11-21T18:00:01"),
        ("1795280400", "2026-11-21T20:00+01:00"),
    ],
)
def test_times_are_widened_to_hours(reused: Running, given_from: str, given_to: str) -> None:
    told = usage(reused, "acme", **{"from": given_from, "to": given_to})
    assert (told["from"], told["to"]) == (1795280400, 1795287600)


def test_the_command(deployed: Running, command_line: CommandLine, tmp_path: Path) -> None:
    deployed.client("acme").post("/invoke/f", json={"prompt": "x", "max_tokens": 2})

    def garnish(key: str, *arguments: str) -> str:
        environment = {**os.environ, "GARNISH_URL": deployed.url, "GARNISH_API_KEY": deployed.keys[key]}
        done = command_line.run("usage", *arguments, folder=tmp_path, environment=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert json.loads(garnish("acme", "--json")) == usage(deployed, "acme")
    rows = [line.split("\t") for line in garnish("admin", "--all-tenants", "--group-by", "version,tenant").splitlines()]
    assert [row[:3] for row in rows] == [["TENANT", "VERSION", "REQUESTS"], ["acme", "2", "1"], ["total", "", "1"]]
    assert garnish("acme", "--group-by", "", "--no-header").startswith("total\t1\t")


def test_device_time_and_costs(
    start: Callable[..., Running], command_line: CommandLine, pirate: dict[str, Any], tmp_path: Path
) -> None:
    """The device's part is that of all choices; costs are only there where there are prices."""
    prices = Prices(input_tokens_1m=1e6, output_tokens_1m=2e6, device_second=100.0)
    running = start(prices=prices)
    running.node()
    client = running.client()
    assert client.post("/deploy/f", files=pirate).status_code == 201
    body = {"model": "f", "prompt": "x", "n": 2, "max_tokens": 2}
    assert client.post("/v1/completions", json=body).status_code == 200
    (row,) = usage(running, "acme")["rows"]
    assert row["device_seconds"] == 2 * DEVICE_SECONDS
    assert row["cost"] == row["prompt_tokens"] + 2 * row["completion_tokens"] + 200 * DEVICE_SECONDS
    assert {name: row[name] for name in row if name.endswith("gb_seconds")} == {
        "device_gb_seconds": 0.0, "host_gb_seconds": 0.0,
        "device_pinned_gb_seconds": 0.0, "host_pinned_gb_seconds": 0.0,
    }  # fmt: skip
    told = client.post("/invoke/f", json={"prompt": "x", "max_tokens": 1}).json()
    assert told["timing"]["device_ms"] == DEVICE_SECONDS * 1000
    environment = {**os.environ, "GARNISH_URL": running.url, "GARNISH_API_KEY": running.keys["acme"]}
    shown = command_line.run("usage", folder=tmp_path, environment=environment)
    header, first, total = (line.split("\t") for line in shown.stdout.splitlines())
    assert (header[5], header[-1]) == ("DEVICE S", "COST")
    assert (first[5], first[-1]) == (f"{3 * DEVICE_SECONDS:.3f}", f"{usage(running, 'acme')['total']['cost']:.3f}")
    assert total[1:] == first[1:]


def test_no_costs_without_prices(deployed: Running) -> None:
    assert usage(deployed, "acme")["total"]["cost"] is None


def test_the_client(deployed: Running) -> None:
    with Client(deployed.url, deployed.keys["acme"]) as client:
        client.invoke("f", "x", max_tokens=2)
        told = client.usage(group_by=["version"])
    assert [(row.version, row.function, row.requests) for row in told.rows] == [(2, None, 1)]
    assert told.total.completion_tokens == 2


def test_a_year_before_and_after_it_is_compacted(deployed: Running, command_line: CommandLine, tmp_path: Path) -> None:
    """Over REST and by the command line; a day more is refused."""
    store = LocalStore(Path(deployed.config.registry))
    end = int(time.time()) // HOUR * HOUR - 48 * HOUR
    for days in range(0, 360, 30):
        key = usage_key("acme", hour_name(end - days * 24 * HOUR), "0" * 16, days)
        store.put(key, b'{"functions":{"f":{"1":{"requests":%d}}}}' % (days + 1))
        os.utime(store.root / key, (1e9, 1e9))
    start = end - 363 * 24 * HOUR
    expected = sum(days + 1 for days in range(0, 360, 30))
    asked = {"from": str(start), "to": str(end + 24 * HOUR)}
    hours = usage(deployed, "acme", group_by="hour", **asked)
    assert (hours["total"]["requests"], len(hours["rows"])) == (expected, 12)
    compact_tenant(store, "acme", store.now(), Tick(1.0, lambda: 0.0, lambda: True))
    assert usage(deployed, "acme", group_by="hour", **asked) == hours
    assert usage(deployed, "admin", group_by="", **asked)["total"] == hours["total"]
    command = ["usage", "--url", deployed.url, "--json", "--group-by", "hour"]
    command += ["--from", asked["from"], "--to", asked["to"]]
    environment = os.environ | {"GARNISH_API_KEY": deployed.keys["acme"]}
    done = command_line.run(*command, folder=tmp_path, environment=environment)
    assert json.loads(done.stdout) == hours, done.stderr
    refused = deployed.client("acme").get("/usage", params={**asked, "from": str(start - 3 * 24 * HOUR)})
    assert refused.status_code == 422 and "8784 hours" in refused.text
