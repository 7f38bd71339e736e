"""Tells the desk when its engine stands still: one that hangs, or was stopped, keeps its connection and is silent."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from node_agent.api.requests import Desk
from node_agent.heartbeat import Watch

LOOK_S = 0.2


async def watch_engine(desk: Desk, path: Path) -> None:
    """Looks at the heartbeat in the file `path` until it is cancelled."""
    watch = Watch(path, LOOK_S)
    while True:
        desk.engine_silent(watch.overdue(time.monotonic()))
        await asyncio.sleep(LOOK_S)
