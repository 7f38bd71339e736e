"""What an idle engine measures, driven by a test."""

from __future__ import annotations

from node_agent.coldstart.calibration import never
from node_agent.coldstart.worker_manager import WorkerManager
from tests.support.local_engine import LocalEngine


def manager_of(engine: LocalEngine) -> WorkerManager:
    manager = engine.engine.worker_manager
    assert isinstance(manager, WorkerManager)
    return manager


def work_while_idle(engine: LocalEngine) -> int:
    """Works until there is nothing to measure. Returns how many pieces there were."""
    manager, pieces = manager_of(engine), 0
    while manager.work(never):
        pieces += 1
        assert pieces < 500
    return pieces
