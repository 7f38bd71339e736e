"""`garnish autoscale` against a real gateway: its lease, its picture of the load, and what it does without either."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from command_line import CommandLine
from running_gateway import Running, until

from garnish import autoscaling
from garnish.autoscaling import LeaseKeeper, read_snapshot
from garnish.client import Client
from garnish.credentials import FILE_NAME, Credentials, write_credentials
from infra.autoscale.rounds import LoadUnknown, PoolView
from infra.autoscale.sizing import Load


@pytest.fixture
def state(gateway: Running, tmp_path: Path) -> Path:
    """A state directory with the gateway's address and keys."""
    known = Credentials(
        url=gateway.url, admin_key=gateway.keys["admin"], tenant="acme", api_key=gateway.keys["acme"], keys={}
    )
    write_credentials(tmp_path / FILE_NAME, known)
    return tmp_path


def test_one_leads_and_the_next_one_takes_over(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoscaling, "RENEW_SECONDS", 0.05)
    first, second = LeaseKeeper(state), LeaseKeeper(state)
    with second.running():
        assert second.trouble() is None
        with first.running():
            assert first.trouble() == f"the autoscaler {second.holder} leads"
        assert second.trouble() is None
    third = LeaseKeeper(state)
    with third.running():
        assert third.trouble() is None, "the lease was given back"


def test_a_lease_that_cannot_be_prolonged_runs_out(
    gateway: Running, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autoscaling, "RENEW_SECONDS", 0.05)
    monkeypatch.setattr(autoscaling, "LEASE_SECONDS", 4.0)
    keeper = LeaseKeeper(state)
    with keeper.running():
        assert keeper.trouble() is None
        gateway.stack.close()
        until(lambda: keeper.trouble() is not None)
        assert "the lease can't be acquired: unreachable" in str(keeper.trouble())


def test_the_picture_counts_as_the_driver_does(gateway: Running, state: Path) -> None:
    """A pool whose instances have four nodes each, another of this host, and nodes of no pool."""
    for number in range(6):
        gateway.node(node_id=f"gpu-{number}", pool="gpu", max_rows=4, running=4)
    gateway.node(node_id="here-1", pool="here", state="draining")
    with Client(gateway.url, gateway.keys["admin"]) as client:
        picture = read_snapshot(client, {"gpu": 4, "here": 1, "gone": 1})
    idle = Load(open_requests=0, queue_wait=0.0, demand=0.0, backlog=0.0, attainment=None)
    busy = Load(open_requests=0, queue_wait=0.0, demand=1.5, backlog=0.0, attainment=None)
    assert picture.pools == {"gpu": PoolView(busy, 1.5), "here": PoolView(idle, 0.0)}
    assert picture.unplaced == idle


def test_a_gateway_that_is_away_is_no_idle_one() -> None:
    with (
        Client("http://127.0.0.1:9", "") as client,
        pytest.raises(LoadUnknown, match="the gateway does not report the load"),
    ):
        read_snapshot(client, {})


Once = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def once(command_line: CommandLine) -> Once:
    return partial(run_once, command_line)


def run_once(command_line: CommandLine, state: Path, *options: str) -> subprocess.CompletedProcess[str]:
    pools = {"here": {"backend": "local", "desired": 0, "max": 2}}
    (state / "serverless.yml").write_text(json.dumps({"service": "demo", "base_model": "./model", "node_pools": pools}))
    environment = {name: value for name, value in os.environ.items() if name not in ("GARNISH_URL", "GARNISH_API_KEY")}
    command = ["autoscale", "--once", "--state", str(state), *options]
    return command_line.run(*command, folder=state, environment=environment)


def test_one_round_says_what_it_could_not_do(state: Path, once: Once) -> None:
    """One node is wanted, and the pool was never applied."""
    done = once(state)
    assert done.returncode == 1
    assert done.stdout.startswith("here: held at 0: idle, and min is 1; ")
    (told,) = [json.loads(line) for line in once(state, "--json").stdout.splitlines()]
    assert (told["pool"], told["action"], told["size"], told["wanted"]) == ("here", "held", 0, 1)
    assert told["load"]["open_requests"] == 0 and told["at"] > 0


def test_without_a_gateway_it_holds(tmp_path: Path, once: Once) -> None:
    write_credentials(
        tmp_path / FILE_NAME,
        Credentials(url="http://127.0.0.1:9", admin_key="k", tenant="acme", api_key="k", keys={}),
    )
    done = once(tmp_path)
    assert done.returncode == 1
    assert done.stdout.startswith("here: held: the lease can't be acquired: unreachable")


def test_a_file_without_pools_is_refused(state: Path, once: Once) -> None:
    (state / "other.yml").write_text('{"service": "demo", "base_model": "./model"}')
    done = once(state, "-f", "other.yml")
    assert done.returncode == 1
    assert "there are no node_pools to scale" in done.stderr
