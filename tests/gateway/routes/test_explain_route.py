"""GET /explain/{id} of calls that were really routed, and `garnish explain`."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from command_line import CommandLine
from msgspec.structs import replace
from running_gateway import Running
from stub_node import echo, refuse

from cluster.news import Resident
from cluster.performance_model import PerformanceModel
from gateway.calls.explanations import ExplainReply
from tests.cluster.measured import PROFILE

CALL = {"prompt": "x", "max_tokens": 3}


def explained(running: Running, name: str, key: str = "acme", **headers: str) -> ExplainReply:
    reply = running.client(key).get(f"/explain/{name}", headers=headers)
    assert reply.status_code == 200, reply.text
    return msgspec.json.decode(reply.content, type=ExplainReply)


def performance(running: Running) -> PerformanceModel:
    """As the node would have measured it for its base."""
    (node,) = running.nodes
    return replace(PROFILE.model, key=replace(PROFILE.key, base=node.record("ready").base))


def test_every_name_of_a_call_explains_it(reused: Running, pirate: dict[str, Any]) -> None:
    client = reused.client()
    digest = client.post("/deploy/pirate", files=pirate).json()["digest"]
    (node,) = reused.nodes
    node.publish(reused.url, performance=performance(reused), running=1, max_rank=8, request_ranks=8, adapter_ranks=8,
                 residents=[Resident(digest, "host", 1, 0)])  # fmt: skip
    reply = client.post("/invoke/pirate", json=CALL, headers={"x-request-id": "mine.1"})
    made = reply.json()["id"]
    told = [explained(reused, name) for name in (made, f"{made}-0", "mine.1")]
    acme = reused.tenants["acme"]
    told += [explained(reused, made, "admin"), explained(reused, "mine.1", "admin", **{"x-garnish-tenant": acme})]
    assert all(one == told[0] for one in told)
    assert (told[0].id, told[0].request_id, told[0].tenant, told[0].function) == (made, "mine.1", acme, "pirate")
    (each,) = told[0].decisions
    decision = each.decision
    assert (each.request, decision.node, decision.outcome, decision.policy) == (
        f"{made}-0", "node-0", "routed", "rank_aware",
    )  # fmt: skip
    assert (decision.tries, decision.more, decision.excluded, decision.expected_tokens) == (1, 0, [], 1.5)
    (candidate,) = decision.candidates
    assert (candidate.node, candidate.chosen, candidate.tier, candidate.running) == ("node-0", True, "host", 1)
    assert candidate.total is not None and candidate.total > 0
    assert candidate.age is not None and candidate.age < 60
    assert candidate.exposed_load is not None and candidate.exposed_load > 0


def test_what_belongs_to_others_is_what_there_is_not(reused: Running, pirate: dict[str, Any]) -> None:
    client = reused.client()
    client.post("/deploy/pirate", files=pirate)
    made = client.post("/invoke/pirate", json=CALL).json()["id"]
    unknown = made[:-4] + ("aaaa" if made[-4:] != "aaaa" else "bbbb")
    answers = []
    for name in (made, unknown):
        for key, headers in (("other", {}), ("admin", {"x-garnish-tenant": reused.tenants["other"]})):
            reply = reused.client(key).get(f"/explain/{name}", headers={"x-request-id": "same", **headers})
            answers.append((reply.status_code, reply.text.replace(name, "NAME")))
    assert len(set(answers)) == 1 and answers[0][0] == 404
    assert reused.client(None).get(f"/explain/{made}").status_code == 401
    assert reused.client().get(f"/explain/{made}", params={"odd": "1"}).status_code == 422
    as_acme = {"x-garnish-tenant": reused.tenants["acme"]}
    assert reused.client("other").get(f"/explain/{made}", headers=as_acme).status_code == 403


def test_a_second_placement_and_a_refusal_are_told(start: Callable[..., Running]) -> None:
    running = start()
    running.node(refuse)
    running.node(echo)
    client = running.client()
    reply = client.post("/v1/completions", json={**CALL, "model": "stories260K", "n": 2})
    assert reply.status_code == 200
    told = explained(running, reply.json()["id"])
    assert told.function == "stories260K"
    ways: dict[str, list[tuple[str | None, list[str]]]] = {}
    for each in told.decisions:
        ways.setdefault(each.request, []).append((each.decision.node, each.decision.excluded))
    assert len(ways) == 2
    assert all(way[-1] == ("node-1", ["node-0"]) or way == [("node-1", [])] for way in ways.values())
    for node in running.nodes:
        node.publish(running.url, state="draining")
    refused = client.post("/v1/completions", json={**CALL, "model": "stories260K"}, headers={"x-request-id": "none"})
    assert refused.status_code == 503
    (each,) = explained(running, "none").decisions
    decision = each.decision
    assert (decision.outcome, decision.node, decision.candidates) == ("unavailable", None, [])


def test_lengths_are_learnt_and_forecasts_are_compared(gateway: Running) -> None:
    client = gateway.client()
    gateway.nodes[0].publish(gateway.url, performance=performance(gateway))
    for _ in range(3):
        made = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 6, "model": "stories260K"}).json()[
            "id"
        ]
    assert explained(gateway, made).decisions[0].decision.expected_tokens == pytest.approx(6)
    text = gateway.client("admin").get("/metrics").text
    counts = [line for line in text.splitlines() if line.startswith("garnish_ttft_forecast_error_seconds_count")]
    assert sum(float(line.split()[-1]) for line in counts) == 3
    assert 'garnish_schedule_seconds_bucket{le="0.0001"}' in text


def test_nothing_is_forecast_until_the_node_has_a_model_of_its_own(gateway: Running) -> None:
    """What is assumed of such nodes is another machine; the gateway learns of the model from the node's record."""
    client, (node,) = gateway.client(), gateway.nodes
    told = []
    for known in ({"measuring": 0.4}, {"performance": performance(gateway)}):
        node.publish(gateway.url, **known)
        made = client.post("/v1/completions", json={**CALL, "model": "stories260K"}).json()["id"]
        told.append(explained(gateway, made).decisions[0].decision.candidates[0])
    before, after = told
    assert (before.chosen, before.model, before.ttft, before.step, before.total) == (True, "assumed", None, None, None)
    assert (after.chosen, after.model) == (True, "measured")
    assert after.ttft is not None and after.step is not None and after.total is not None
    text = gateway.client("admin").get("/metrics").text
    counts = [line for line in text.splitlines() if line.startswith("garnish_ttft_forecast_error_seconds_count")]
    assert sum(float(line.split()[-1]) for line in counts) == 1, "of the call that was forecast"


def test_the_command_shows_it(gateway: Running, command_line: CommandLine, tmp_path: Path) -> None:
    client = gateway.client()
    body = {**CALL, "model": "stories260K"}
    client.post("/v1/completions", json=body, headers={"x-request-id": "mine"}).raise_for_status()

    def garnish(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "GARNISH_URL": gateway.url, "GARNISH_API_KEY": gateway.keys["acme"]}
        return command_line.run("explain", *arguments, folder=tmp_path, environment=environment)

    told = msgspec.json.decode(garnish("mine", "--json").stdout, type=ExplainReply)
    assert told.request_id == "mine" and json.loads(garnish("mine", "--json").stdout)["decisions"]
    shown = garnish("mine")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "on node-0, by rank_aware" in shown.stdout
    assert "\tNODE\tTIER\tRUNNING\t" in shown.stdout
    assert "*\tnode-0\tdevice\t0\t0\t0\t" in shown.stdout
    assert "\t-\t-\t-\t-\t-\t-\t-\t-\t" in shown.stdout and "no forecast: its performance model is not" in shown.stdout
    gateway.nodes[0].publish(gateway.url, performance=performance(gateway))
    client.post("/v1/completions", json=body, headers={"x-request-id": "forecast"}).raise_for_status()
    words = re.search(
        r"node-0: it waits 0 ms to start, its prompt adds (\S+) ms, its adapter 0 ms: a first token after (\S+) ms. "
        r"Every token gets (\S+) of that \((\S+) ms\) and a step of (\S+) ms. The 0 requests there pay 0 ms a token "
        r"between them. Total (\S+) ms\n",
        garnish("forecast").stdout,
    )
    assert words is not None
    _, ttft, share, mine, step, total = (float(number) for number in words.groups())
    assert mine == pytest.approx(ttft * share, rel=0.02) and total == pytest.approx(mine + step, rel=0.02)
    unknown = garnish("another")
    assert unknown.returncode == 1 and "call 'another' is not known" in unknown.stderr
    assert garnish("mine", "--admin", "--tenant", "acme").returncode == 2
