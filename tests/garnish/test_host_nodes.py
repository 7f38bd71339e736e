"""Nodes that share a host: whatever starts a node, and whatever profiles it, gives it the same share of the cores."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from cluster.secret import create_secret
from garnish.cli import profile
from garnish.cli.main import app
from garnish.config import load_service_file
from garnish.node_pools import stack_of
from garnish.pool_node import Spec, node_command
from garnish.up.prepare import UpOptions, prepare
from infra.render import render
from node_agent import supervisor
from node_agent.config import EngineConfig, NodeConfig
from node_agent.cores import core_share, usable_cores
from node_agent.engine.setup import SMALL_MODEL_BYTES, default_threads

POOLS = {"here": {"backend": "local", "desired": 1, "max": 3}}


class Settings:
    """What engines would be started and measured with."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.state, self.file = folder, folder / "state", folder / "serverless.yml"
        self.engines: list[EngineConfig] = []

    def measure(self, config: EngineConfig, *_: object) -> dict[str, object]:
        self.engines.append(config)
        raise SystemExit(0)

    def run(self, config: NodeConfig) -> int:
        self.engines.append(config.engine)
        return 0

    def of(self, *command: str, own: bool = False) -> EngineConfig:
        """`own`: the command says itself which file and state it means."""
        options = [] if own else ["-f", str(self.file), "--state", str(self.state)]
        done = CliRunner().invoke(app, [*command, *options])
        assert done.exit_code == 0, done.output
        return self.engines.pop()


@pytest.fixture
def settings(tmp_path: Path, stories_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    made = Settings(tmp_path)
    made.state.mkdir()
    create_secret(made.state / "cluster.secret")
    made.file.write_text(json.dumps({"service": "s", "base_model": str(stories_dir), "node_pools": POOLS}))
    monkeypatch.setattr(profile, "run_measurement", made.measure)
    monkeypatch.setattr(supervisor, "run", made.run)
    return made


def test_nodes_of_up_are_profiled_with_their_share(settings: Settings) -> None:
    nodes = prepare(UpOptions(file=settings.file, state=settings.state, port=18080, nodes=2), settings.state).nodes
    assert [node.engine.host_nodes for node in nodes] == [2, 2]
    assert settings.of("profile", "--node-id", "node-1", "--host-nodes", "2") == nodes[0].engine


def test_nodes_that_are_started_one_by_one_are_profiled_with_their_share(settings: Settings) -> None:
    served = settings.of("node", "--gateway", "http://g", "--node-id", "n", "--host-nodes", "4")
    assert served.host_nodes == 4
    assert settings.of("profile", "--node-id", "n", "--host-nodes", "4") == served
    assert settings.of("profile", "--node-id", "n") == msgspec.structs.replace(served, host_nodes=1)


def test_nodes_of_a_pool_are_profiled_with_their_share(settings: Settings) -> None:
    """As Terraform's module hands it on: the pool's bound counts, not what is desired."""
    module = render(stack_of(load_service_file(settings.file), settings.state))["module"]["pool_here"]
    host = module["host"]
    spec = Spec(
        service="s", pool="here", node="here-2", service_file=host["service_file"], state=host["state"],
        gateway_url=host["gateway_url"], secret_file=host["secret_file"], host_nodes=module["host_nodes"],
    )  # fmt: skip
    served = settings.of(*node_command(spec), own=True)
    assert served.host_nodes == 3
    assert settings.of("profile", "--node-id", "here-2") == served


@pytest.mark.parametrize("nodes", [1, 2, 3, 64])
def test_threads_of_a_node(tmp_path: Path, nodes: int) -> None:
    """A share of the cores; one for a small model, whatever the share."""
    with (tmp_path / "model.safetensors").open("wb") as weights:
        weights.truncate(SMALL_MODEL_BYTES)
        assert default_threads(tmp_path, nodes) == core_share(nodes) <= usable_cores()
        weights.truncate(SMALL_MODEL_BYTES - 1)
        assert default_threads(tmp_path, nodes) == 1
