"""The product's modules import each other in no circle but those listed, and the list may only shrink."""

from __future__ import annotations

from pathlib import Path

from tests.lint.circles import find_circles, import_graph

LISTED = [
    {
        "node_agent.adapter_memory.device_copy",
        "node_agent.adapter_memory.device_loads",
        "node_agent.adapter_memory.device_room",
        "node_agent.adapter_memory.fetch",
        "node_agent.adapter_memory.host",
        "node_agent.adapter_memory.host_map",
        "node_agent.adapter_memory.host_memory",
        "node_agent.adapter_memory.layout",
        "node_agent.adapter_memory.loader",
        "node_agent.adapter_memory.loads",
        "node_agent.adapter_memory.pages",
        "node_agent.adapter_memory.pool",
        "node_agent.adapter_memory.store",
        "node_agent.adapter_memory.table",
        "node_agent.adapter_memory.weights",
        "node_agent.types",
    },
    {
        "garnish.autoscaling",
        "garnish.cli.autoscale",
        "garnish.cli.infra",
        "garnish.cli.main",
        "garnish.pool_node",
        "garnish.provision",
        "garnish.this_host",
    },
    {
        "gateway.calls.dispatch",
        "gateway.calls.migration",
        "gateway.residency.residency",
        "gateway.services",
        "gateway.usage.residents",
    },
    {
        "node_agent.coldstart.calibration",
        "node_agent.coldstart.setup",
        "node_agent.coldstart.worker_manager",
        "node_agent.engine.loop",
    },
    {"benchmarks.gpu_suite", "benchmarks.kernels"},
    {"garnish.client", "garnish.methods"},
    {"node_agent.coldstart.handoffs", "node_agent.coldstart.workers"},
    {"node_agent.coldstart.worker", "node_agent.coldstart.worker_process"},
]


def test_no_circle_is_new() -> None:
    circles = find_circles(import_graph())
    assert [circle for circle in circles if not any(set(circle) <= listed for listed in LISTED)] == []


def test_imports_of_any_kind_make_a_circle(tmp_path: Path) -> None:
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "a.py").write_text("import kernels.b\n")
    (package / "b.py").write_text("if TYPE_CHECKING:\n    from kernels.c import C\n")
    (package / "c.py").write_text("def f():\n    from kernels import a\n")
    (package / "alone.py").write_text("from kernels import a, alone\n")
    assert find_circles(import_graph(tmp_path)) == [["kernels.a", "kernels.b", "kernels.c"]]
