"""Tells the registry when its engine stands still: a hung or stopped one keeps its connection."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from node_agent.api.requests import RequestRegistry
from node_agent.heartbeat import Watch

LOOK_S = 0.2


async def watch_engine(registry: RequestRegistry, path: Path) -> None:
    """Looks at the heartbeat in the file `path` until it is cancelled."""
    watch = Watch(path, LOOK_S)
    while True:
        registry.engine_silent(watch.overdue(time.monotonic()))
        await asyncio.sleep(LOOK_S)
