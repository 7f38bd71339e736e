from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from worlds import PATIENCE, World

from cluster import redis_state
from tests.support.redis_server import RedisServer, redis_server


@pytest.fixture(scope="module")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One server for a module; worlds keep apart by their prefixes."""
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A server for one test, which may kill or empty it."""
    with redis_server(tmp_path) as server:
        yield server


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a worker has published it also sees, however slow the host."""
    monkeypatch.setattr(redis_state, "CATCH_UP_SECONDS", PATIENCE)


@pytest.fixture(params=["memory", "redis"])
def world(request: pytest.FixtureRequest) -> World:
    return World(request.getfixturevalue("shared_redis") if request.param == "redis" else None)
