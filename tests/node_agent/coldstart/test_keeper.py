"""The keeper of worker processes at its end."""

from __future__ import annotations

import os
import threading

import pytest

from node_agent.coldstart import keeper
from node_agent.coldstart.keeper import Keeper
from node_agent.coldstart.shared import WorkerConfig


def test_a_thread_that_outlives_the_keeper_reads_no_other_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """It hangs in the start of a worker, so `close` gives up waiting; it then goes on to its wake-up."""
    monkeypatch.setattr(keeper, "JOIN_LIMIT_S", 0.0)
    started, go_on = threading.Event(), threading.Event()

    def config(index: int, epoch: int) -> WorkerConfig:
        started.set()
        assert go_on.wait(60)
        raise OSError("out of memory")

    kept = Keeper(1, config, (), 1.0, lambda worker: None)
    kept.start()
    assert started.wait(60)
    kept.close()
    other = os.eventfd(5, os.EFD_NONBLOCK)
    try:
        go_on.set()
        kept._thread.join(60)
        assert not kept._thread.is_alive()
        assert os.eventfd_read(other) == 5
    finally:
        os.close(other)
        if other != kept._wake:
            os.close(kept._wake)
