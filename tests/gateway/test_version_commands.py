"""The Python client and the command line where they move versions, against a real gateway."""

from __future__ import annotations

import asyncio
import json
import os
from functools import partial
from pathlib import Path

import pytest
from command_line import CommandLine
from running_gateway import Running, upload

import garnish


@pytest.fixture
def deployed(gateway: Running, stories_adapters: dict[str, Path]) -> Running:
    client = gateway.client()
    for name in ("pirate", "dragon", "space"):
        assert client.post("/deploy/f", files=upload(stories_adapters[name])).status_code == 201
    return gateway


def test_the_client_moves_versions(deployed: Running) -> None:
    with garnish.Client(deployed.url, deployed.keys["acme"]) as client:
        made = client.set_alias("f", "prod", {2: 0.9, 3: 0.1})
        assert (made.version, made.weights) == (None, {"2": 0.9, "3": 0.1})
        moved = client.set_alias("f", "prod", 3, if_match=made.generation)
        with pytest.raises(garnish.GarnishError) as late:
            client.set_alias("f", "prod", 1, if_match=made.generation)
        assert (late.value.type, late.value.status) == ("precondition_failed", 412)
        back = client.roll_back("f", "prod", if_match=moved.generation)
        assert back.weights == made.weights
        assert client.alias("f", "prod") == back
        assert client.set_policy("f", {"max_concurrency": 3}).policy == {"max_concurrency": 3}
        client.delete_version("f", 1)
        with pytest.raises(garnish.GarnishError) as used:
            client.delete_version("f", 2)
        assert (used.value.type, used.value.status) == ("conflict", 409)
        ranks = {entry.version: list(entry.ranks) for entry in client.function("f").versions}
        assert ranks[2] != ranks[3]
        for weights, most in (({2: 0.8, 3: 0.2}, 2), ({2: 0.2, 3: 0.8}, 3)):
            client.set_alias("f", "latest", weights)
            assert client.functions().functions[0].ranks == ranks[most]
        client.set_alias("f", "latest", {2: 0.5, 3: 0.5})
        sides = {
            session: {client.invoke("f", "x", max_tokens=1, session=session).version for _ in range(3)}
            for session in map(str, range(12))
        }
        assert all(len(versions) == 1 for versions in sides.values())
        assert set.union(*sides.values()) == {2, 3}
        client.delete("f")


def test_the_async_client_moves_versions(deployed: Running) -> None:
    async def talk() -> None:
        async with garnish.AsyncClient(deployed.url, deployed.keys["acme"]) as client:
            made = await client.set_alias("f", "prod", 2)
            assert await client.alias("f", "prod") == made
            assert (await client.roll_back("f")).version == 2
            assert (await client.set_policy("f", {"timeout": 5})).policy == {"timeout": 5}
            await client.delete_version("f", 1)
            with pytest.raises(garnish.GarnishError, match="not_found"):
                await client.delete_version("f", 1)
            with pytest.raises(garnish.GarnishError, match="forbidden"):
                await client.deploy("g", "s3://acme-training/runs/7", alias="prod")

    asyncio.run(talk())


def test_commands(deployed: Running, command_line: CommandLine, tmp_path: Path) -> None:
    environment = {**os.environ, "GARNISH_URL": deployed.url, "GARNISH_API_KEY": deployed.keys["acme"]}
    run = partial(command_line.run, folder=tmp_path, environment=environment)

    assert run("alias", "f", "prod", "2").stdout == "f:prod -> 2\n"
    assert run("alias", "f", "prod", "2=90%", "3=10%").stdout == "f:prod -> 2:0.9+3:0.1\n"
    shown = run("alias", "f", "prod").stdout.splitlines()
    assert [line.partition("\t")[0] for line in shown] == ["f:prod -> 2:0.9+3:0.1", "BEFORE", "2"]
    assert (
        run("alias", "f", "prd").stderr == "garnish: not_found: function f has no alias 'prd'; did you mean 'prod'?\n"
    )
    assert "prod=2:0.9+3:0.1" in run("list").stdout
    described = run("describe", "f").stdout
    assert "alias prod: 2:0.9+3:0.1\n" in described
    generation = json.loads(run("describe", "f", "--json").stdout)["generation"]
    assert f"generation: {generation}\n" in described
    late = run("rollback", "f", "--alias", "prod", "--if-match", str(generation - 1))
    assert (late.returncode, late.stdout) == (1, "")
    assert late.stderr.startswith("garnish: precondition_failed: function f has changed meanwhile")
    assert json.loads(run("rollback", "f", "--alias", "prod", "--json").stdout)["version"] == 2
    assert run("delete", "f", "--version", "1").stdout == "f:1: deleted\n"
    changed = run("policy", "f", "idle_ttl=15m", "slo_class=standard", 'defaults={"top_k": 3}', "max_concurrency=8")
    assert changed.stdout.splitlines() == [
        'defaults: {"top_k":3}', "max_concurrency: 8", "idle_ttl: 900.0", 'slo_class: "standard"'
    ]  # fmt: skip
    back = run("policy", "f", "max_concurrency=", "slo_class=null", "defaults=", "--json")
    assert json.loads(back.stdout) == {"idle_ttl": 900.0}
    assert json.loads(run("policy", "f", "idle_ttl=", "prefetch=off", "--json").stdout) == {"prefetch": "off"}
    assert '\npolicy prefetch: "off"\n' in run("describe", "f").stdout
    odd = run("policy", "f", "provisioned=1")
    assert (odd.returncode, odd.stdout) == (1, "")
    assert odd.stderr.startswith("garnish: validation_failed: provisioned: ")
    assert run("policy", "f", "idle_ttl=soon").returncode == 2
    refused = run("deploy", "g", "s3://acme-training/runs/7")
    assert (refused.returncode, refused.stderr.splitlines()[-1][:19]) == (1, "garnish: forbidden:")
