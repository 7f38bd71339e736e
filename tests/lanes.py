"""Which tests stay together, and in which order they begin, when several processes share them (pytest-xdist).

Tests of a file stay together, for they share fixtures. What starts whole services or runs a study goes in lanes, one
lane for studies and one for services on every second core (two at least), so that never more of these run at once.
They begin first; the other processes wait most of their time.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.scheduler.loadscope import Producer

TESTS = Path(__file__).parent
SHARING = {
    "test_service_compare.py": 0,
    "test_service_exactness.py": 0,
    "test_service_function_life.py": 0,
    "test_service_restored_copies.py": 1,
    "test_service_resumed.py": 1,
}
"""The lane of each file whose tests share a service with other files' (tests/e2e/conftest.py has these services)."""
SERVICES = sorted(file.name for file in (TESTS / "e2e").glob("test_*.py"))
SERVICE_LANES = max(2, len(os.sched_getaffinity(0)) // 2)
LANES = ("studies", *(f"services {number}" for number in range(SERVICE_LANES)))
ALONE = "not slow and alone"
"""The mark expression of `make test`'s second part."""


def lane(nodeid: str) -> str:
    """Returns a lane's name, or else the test's file."""
    file = nodeid.partition("::")[0]
    folder, _, name = file.rpartition("/")
    if folder.endswith("e2e"):
        return f"services {SHARING.get(name, SERVICES.index(name) % SERVICE_LANES)}"
    return "studies" if folder.endswith("benchmarks") else file


class Lanes(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return lane(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling | None:
    return Lanes(config, log) if config.getoption("dist") == "loadfile" else None


def lacks_wanted(file: Path, config: pytest.Config) -> bool:
    """Whether the tests that need a core to themselves are wanted, and the file has none: loading the others' modules
    would take as long as these tests."""
    return config.getoption("markexpr") == ALONE and file.suffix == ".py" and "mark.alone" not in file.read_text()


def order(items: list[pytest.Item]) -> None:
    """Sort `items`, where several processes share them: lanes first, then files with many tests, so that the last ones,
    in which not all processes have something to do, take little time."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    lanes = [lane(item.nodeid) for item in items]
    counts = Counter(lanes)
    order = {name: (LANES.index(name) if name in LANES else len(LANES), -counts[name]) for name in counts}
    pairs = sorted(zip(lanes, items, strict=True), key=lambda pair: (*order[pair[0]], pair[0]))
    items[:] = [item for _, item in pairs]
