"""Records the wall and processor seconds of each test, and sums them by folder.

    make test PYTEST_ARGS="-p tests.times --times DIR"     one file for each test process in DIR
    python -m tests.times DIR JSON                         writes the sums

Processor seconds are those of the test's process and of its children that have ended. A service that several files
share ends with the test process, and so belongs to none of them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest

Seconds = tuple[float, float]
"""Wall and processor seconds."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", type=Path, metavar="DIR", help="record each test's seconds there")


def seconds() -> Seconds:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return time.monotonic(), sum(each.ru_utime + each.ru_stime for each in used)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool, bool]:
    folder: Path | None = item.config.getoption("times", None)
    if folder is None:
        return (yield)
    start = seconds()
    try:
        return (yield)
    finally:
        wall, processor = (end - begin for end, begin in zip(seconds(), start, strict=True))
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps([item.nodeid, round(wall, 3), round(processor, 3)]) + "\n")


def folder_of(nodeid: str) -> str:
    """Returns the folder below tests/; that of cold starts counts apart from node_agent."""
    path = Path(nodeid.partition("::")[0]).relative_to("tests")
    parts = path.parts[:-1]
    return "/".join(parts[: 2 if parts[:2] == ("node_agent", "coldstart") else 1]) or path.name


def summed(folder: Path) -> dict[str, dict[str, float]]:
    """Returns, by folder, the number of tests and their seconds."""
    sums: dict[str, dict[str, float]] = defaultdict(lambda: {"tests": 0, "wall_s": 0.0, "processor_s": 0.0})
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text().splitlines():
            nodeid, wall, processor = json.loads(line)
            row = sums[folder_of(nodeid)]
            row["tests"] += 1
            row["wall_s"] += wall
            row["processor_s"] += processor
    rows = sorted(sums.items(), key=lambda pair: -pair[1]["processor_s"])
    return {name: {key: round(value) for key, value in row.items()} for name, row in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("report", type=Path)
    options = parser.parse_args()
    options.report.write_text(json.dumps(summed(options.folder), indent=1) + "\n")


if __name__ == "__main__":
    main()
