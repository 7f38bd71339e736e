"""The report of a study: a JSON object with the commit, machine, versions, settings, seed, rows and figures."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.common.rule import host, table, wrapped
from kernels.level import LEVELS, OTHER, SWITCH, host_level, levels_up_to, used_level
from node_agent.cores import cpu_name, usable_cores
from tests.support.levels import level_environment

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
LEVEL_NAMES = {"amx": "AMX", "avx512_bf16": "AVX512-BF16", "avx512": "AVX512", "avx2": "AVX2", OTHER: "below AVX2"}
CORES = usable_cores()
"""Cores of the host, counted before a study pins its threads."""
ON_ONE_CORE = " (a fixed computation on one core)"
SMOLLM2, STORIES = "SmolLM2-135M-Instruct", "stories260K"
PACKAGES = ("torch", "triton", "transformers", "peft", "tokenizers", "numpy")


def arguments(description: str, model: str = "") -> argparse.ArgumentParser:
    """Returns a parser of the options that every study takes. `model`: the default of `--model`, in models/."""
    parser = argparse.ArgumentParser(description=description)
    if model:
        parser.add_argument("--model", type=_absolute, default=ROOT / "models" / model, metavar="DIR")
    parser.add_argument("--quick", action="store_true", help="a smoke run of under a minute; its figures mean nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report here")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--level", choices=LEVELS, action=_Level, help="use no instructions above this level")
    return parser


def _absolute(text: str) -> Path:
    return Path(text).absolute()


def example_adapter(model: Path, name: str = "pirate") -> Path:
    """Returns the folder of an adapter in examples/ for this model."""
    return ROOT / "examples" / "adapters" / model.name / name


class _Level(argparse.Action):
    """Starts the study again with this level, unless it has it."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *_: Any) -> None:
        setattr(namespace, self.dest, values)
        if os.environ.get(SWITCH) == values:
            return
        if values not in levels_up_to(host_level()):
            parser.error(f"--level {values}: this processor has {host_level()} at most")
        os.execve(sys.executable, sys.orig_argv, os.environ | level_environment(values))


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


def save(document: dict[str, Any], file: Path | None) -> None:
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(document, indent=1) + "\n")


def publish(document: dict[str, Any], file: Path | None) -> None:
    save(document, file)
    print(json.dumps(document["figures"], indent=1))


def run_study(study: Callable[[argparse.Namespace, Path], dict[str, Any]], options: argparse.Namespace) -> None:
    """Runs the study, in a folder that is removed at its end, and publishes its report."""
    with tempfile.TemporaryDirectory() as root:
        publish(study(options, Path(root)), options.json)


def load(study: str) -> dict[str, Any]:
    """A committed report."""
    document: dict[str, Any] = json.loads((RESULTS / f"{study}.json").read_text())
    return document


def origin(document: dict[str, Any]) -> str:
    """Returns a sentence on the origin of a report's figures."""
    versions = document["versions"]
    return (
        f"Commit {document['commit']}, {host(document)}, torch {versions['torch']}, "
        f"transformers {versions['transformers']}, PEFT {versions['peft']}, seed {document['seed']}."
    )


def caption(document: dict[str, Any], text: str) -> str:
    """The lines above a table: what it shows, and where its figures come from."""
    return wrapped(f"{text} {origin(document)}".lstrip())


def captioned_table(
    document: dict[str, Any], text: str, head: Iterable[str], rows: Iterable[Iterable[str]], *notes: str
) -> str:
    """Returns a caption, a table, and the notes below it, each a paragraph."""
    lines = [caption(document, text), "", *table(head, rows)]
    for paragraph in notes:
        lines += ["", wrapped(paragraph)]
    return "\n".join(lines)


def probe_text(values: Mapping[str, float], what: str = "") -> str:
    """Returns a sentence on the contention probe. `values`: settings or figures that have both of its times."""
    before, after = values["probe_before_ms"], values["probe_after_ms"]
    return f"Contention probe{what}: {before:.2f} ms before, {after:.2f} ms after."


def machine() -> dict[str, Any]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cpu": cpu_name(),
        "level": LEVEL_NAMES[used_level()],
        "host_level": LEVEL_NAMES[host_level()],
        "cores": CORES,
        "gpu": gpu,
    }


class ContentionProbe:
    """Times a fixed computation when it is made, and again when its values are read: the same on a calm machine."""

    def __init__(self) -> None:
        self._before = contention_probe()

    def values(self) -> dict[str, float]:
        return {"probe_before_ms": self._before, "probe_after_ms": contention_probe()}


def contention_probe() -> float:
    """Returns the milliseconds of a fixed single-threaded computation."""
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
