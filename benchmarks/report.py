"""What every study writes: one JSON object with the commit, the machine, versions, settings, seed, rows and figures."""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import torch

from node_agent.cores import usable_cores
from node_agent.device import cpu_name

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("torch", "triton", "transformers", "peft", "tokenizers", "numpy")


def arguments(description: str) -> argparse.ArgumentParser:
    """The options that every study takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="a smoke run of under a minute; its figures mean nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report here")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def report(
    study: str,
    settings: dict[str, Any],
    seed: int,
    rows: list[dict[str, Any]],
    figures: dict[str, float],
    simulated: bool = False,
) -> dict[str, Any]:
    return {
        "study": study,
        "commit": _commit(),
        "machine": machine(),
        "versions": {name: _version(name) for name in PACKAGES},
        "settings": settings,
        "seed": seed,
        "simulated": simulated,
        "rows": rows,
        "figures": {name: round(value, 4) for name, value in figures.items()},
    }


def publish(document: dict[str, Any], file: Path | None) -> None:
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document["figures"], indent=1))


def load(study: str) -> dict[str, Any]:
    """A committed report."""
    document: dict[str, Any] = json.loads((RESULTS / f"{study}.json").read_text())
    return document


def origin(document: dict[str, Any]) -> str:
    """Where a report's figures come from, as a sentence."""
    of, versions = document["machine"], document["versions"]
    return (
        f"Commit {document['commit']}, {of['cores']} cores of {of['cpu']}, torch {versions['torch']}, "
        f"transformers {versions['transformers']}, PEFT {versions['peft']}, seed {document['seed']}."
    )


def machine() -> dict[str, Any]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"cpu": cpu_name(), "cores": usable_cores(), "gpu": gpu}


def contention_probe() -> float:
    """Milliseconds of a fixed single-threaded computation: the same before and after, on a machine that was calm."""
    a = torch.ones(256, 256)
    times = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for _ in range(15):
        begin = time.perf_counter()
        for _ in range(10):
            a @ a
        times.append(time.perf_counter() - begin)
    torch.set_num_threads(threads)
    return round(median(times) * 1e3, 3)


def _commit() -> str:
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"
