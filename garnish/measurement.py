"""Runs the measurement of a node in a process of its own, and follows what it says."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from garnish.child_messages import child_messages
from garnish.errors import FrontDoorError
from node_agent.config import EngineConfig, ProfileProcessConfig

COMMAND = (sys.executable, "-m", "node_agent.profile_process")
LONGEST_STEP = 1800.0
"""Seconds without a word after which the measurement counts as stuck: a large base on few cores takes its time."""


def run_measurement(
    config: EngineConfig,
    step: Callable[[str, float | None], None],
    command: Sequence[str] = COMMAND,
    patience: float = LONGEST_STEP,
) -> dict[str, Any]:
    """Measures the node, and returns its cold-start profile (`cold_start`) and its performance model (`performance`),
    which the process has also written to `config.profile` and beside it. `step` is told what is being done, and which
    share of it is done.

    The process ends with this call, however that ends, and with this process. Raises FrontDoorError.
    """
    settings = ProfileProcessConfig(parent=os.getpid(), engine=config)
    with contextlib.closing(child_messages(command, settings, doing="the measurement", patience=patience)) as messages:
        for message in messages:
            if message.get("type") == "step":
                step(message["text"], message.get("share"))
            elif message.get("type") == "failed":
                raise FrontDoorError(f"the node can't be measured: {message['message']}")
            else:
                message.pop("type", None)
                return dict(message)
    raise FrontDoorError("the measuring process ended before it was done; its log is above")
