"""Nodes that are stood in for, and pools of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from garnish import node_pools
from tests.garnish.local_pools import Pools


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting and ending a node by terraform does nothing; and no gateway is known by the environment."""
    monkeypatch.setattr(node_pools, "PROGRAM", (sys.executable, "-c", "pass"))
    for name in ("GARNISH_URL", "GARNISH_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def pools(tmp_path: Path, stand_in: None) -> Iterator[Pools]:
    made = Pools(tmp_path)
    yield made
    made.end()
