"""What is made of another project's client, in the place of the study's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.clients.foreign_clients import Run
from benchmarks.many import foreign
from benchmarks.many.cells import Load
from benchmarks.many.trace_window import Arrival, Window

TIMES = {"ttft": 0.0, "e2el": 1000.0}
SAVED = {"completed": 3, "failed": 1, "request_throughput": 0.5} | {
    f"p{share}_{kind}_ms": base + share for kind, base in TIMES.items() for share in (50, 95, 99)
}


class Service:
    url, key = "http://here", "secret"


def test_it_calls_the_functions_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[tuple[str, ...]] = []

    def call(self: Run, *command: str) -> str:
        commands.append(command)
        assert self.key == "secret" and self.folder == tmp_path
        Path(command[command.index("--result-filename") + 1]).write_text(json.dumps(SAVED))
        return ""

    monkeypatch.setattr(Run, "call", call)
    load = Load(Window([Arrival(0.5, 7, 0), Arrival(1.0, 2, 1), Arrival(2.0, 7, 0)], 60.0), 0, 0.25, ["p", "q"], 16)
    service: Any = Service()
    row = foreign.foreign_row(service, load, tmp_path)
    (command,) = commands
    at = command.index("--lora-modules")
    assert command[at + 1 : at + 5] == ("a7", "a2", "a7", "--lora-assignment")
    assert command[command.index("--request-rate") + 1] == "4.0"
    assert command[command.index("--num-prompts") + 1] == "3"
    assert "secret" not in command
    assert row["ttft_p95_ms"] == 95 and row["e2e_p99_ms"] == 1099 and (row["completed"], row["failed"]) == (3, 1)
    rows = [{"variant": "ondemand", **row}, {"variant": "forecast", **row, "ttft_p95_ms": 38.0}]
    figures = foreign.figures_of(rows)
    assert figures["ttft_p95_over_ondemand"] == pytest.approx(0.4) and figures["failed"] == 2
