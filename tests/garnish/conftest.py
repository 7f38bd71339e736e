"""Nodes that are stood in for, and pools of them; the command line in this process."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from garnish import drain, node_pools, provision
from garnish.cli.main import main
from infra.terraform import Program, find_program
from tests.garnish.local_pools import Pools


class Ended(NamedTuple):
    """How a command ended, as that of a process is told."""

    returncode: object
    stdout: str
    stderr: str


@pytest.fixture
def command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Ended]:
    """Runs a command of `garnish` in the folder `tmp_path`, as a process of it does but for what a start costs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))

    def run(*arguments: str) -> Ended:
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        return Ended(ended.value.code, *capsys.readouterr())

    return run


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting and ending a node by terraform does nothing; and no gateway is known by the environment."""
    monkeypatch.setattr(node_pools, "PROGRAM", ("true",))
    for name in ("GARNISH_URL", "GARNISH_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def terraform() -> Program:
    return find_program()


@pytest.fixture(scope="session")
def place_of_pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    """The folder of all pools, and the port of their gateways, which nobody else can take."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        yield tmp_path_factory.mktemp("pools"), held.getsockname()[1]


@pytest.fixture
def pools(
    place_of_pools: tuple[Path, int], terraform: Program, stand_in: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Pools]:
    monkeypatch.setattr(provision, "find_program", lambda: terraform)
    monkeypatch.setattr(drain, "POLL_SECONDS", 0.02)
    made = Pools(*place_of_pools)
    yield made
    made.end()
