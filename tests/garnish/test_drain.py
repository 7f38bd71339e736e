"""Draining nodes that are about to go, against an HTTP server that answers as a gateway does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from garnish.client import Client
from garnish.credentials import Connection
from garnish.drain import drain
from garnish.errors import GarnishError
from tests.garnish.draining_gateway import Gateway, running_gateway


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateway]:
    """It is asked often."""
    monkeypatch.setattr("garnish.drain.POLL_SECONDS", 0.01)
    with running_gateway() as server:
        yield server


@pytest.fixture
def client(gateway: Gateway) -> Iterator[Client]:
    with Client(connection=Connection(gateway.url, "gak_x")) as made:
        yield made


def ignore(_line: str) -> None:
    pass


def test_it_waits_until_nothing_is_open(gateway: Gateway, client: Client) -> None:
    gateway.open = {"here-1": 5, "here-2": 6, "other": 7}
    told: list[str] = []
    assert drain(client, ["here-1", "here-2"], 60.0, told.append) == ["here-1", "here-2"]
    assert gateway.drained == ["here-1", "here-2"]
    assert gateway.open == {"here-1": 0, "here-2": 0, "other": 7}
    assert told[0] == "draining: requests are open on here-1, here-2"


def test_nodes_that_the_gateway_does_not_know_are_left_out(gateway: Gateway, client: Client) -> None:
    gateway.open = {"here-1": 0}
    assert drain(client, ["here-1", "here-9"], 60.0, ignore) == ["here-1"]
    assert gateway.drained == ["here-1"]


@pytest.mark.parametrize("failure", [(404, "not_found"), (502, "node_failed")])
def test_a_node_that_has_died_meanwhile_needs_no_drain(
    gateway: Gateway, client: Client, failure: tuple[int, str]
) -> None:
    gateway.open, gateway.failing = {"here-1": 1, "here-2": 0}, {"here-1": failure}
    assert drain(client, ["here-1", "here-2"], 60.0, ignore) == ["here-2"]
    assert gateway.drained == ["here-2"]


def test_the_wait_is_bounded(gateway: Gateway, client: Client) -> None:
    gateway.open, gateway.stuck = {"here-1": 1, "here-2": 0}, {"here-1"}
    assert drain(client, ["here-1", "here-2"], 0.0, ignore) == ["here-1", "here-2"]
    assert gateway.open["here-1"] == 1


def test_a_refusal_is_told(gateway: Gateway, client: Client) -> None:
    gateway.open, gateway.failing = {"here-1": 1}, {"here-1": (403, "forbidden")}
    with pytest.raises(GarnishError, match="forbidden"):
        drain(client, ["here-1"], 60.0, ignore)


def test_a_gateway_that_is_away_is_told(gateway: Gateway) -> None:
    with (
        Client(connection=Connection("http://127.0.0.1:9", "")) as client,
        pytest.raises(GarnishError, match="unreachable"),
    ):
        drain(client, ["here-1"], 60.0, ignore)


@pytest.mark.parametrize("end", [KeyboardInterrupt, BrokenPipeError, SystemExit])
def test_who_gives_up_leaves_no_node_drained(gateway: Gateway, client: Client, end: type[BaseException]) -> None:
    """By Ctrl-C, because nobody listens any more, or because a later node can't be drained."""
    gateway.open, gateway.stuck = {"here-1": 1, "here-2": 1}, {"here-1"}

    def give_up(_line: str) -> None:
        assert gateway.drained == ["here-1", "here-2"]
        raise end

    with pytest.raises(end):
        drain(client, ["here-1", "here-2"], 60.0, give_up)
    assert gateway.drained == []

    gateway.failing = {"here-2": (403, "forbidden")}
    with pytest.raises(GarnishError, match="forbidden"):
        drain(client, ["here-1", "here-2"], 60.0, ignore)
    assert gateway.drained == []
