"""Start and end of an engine process, whichever engine it runs: its settings, a request to stop, a failed start."""

from __future__ import annotations

import logging
import signal

from cluster.logs import CAN_NOT_START, set_up_logging
from node_agent.child import die_with_parent, read_config
from node_agent.config import EngineProcessConfig
from node_agent.engine_channel import WakeUp

log = logging.getLogger("garnish.engine")


class StopRequest:
    """Request to stop that SIGTERM and SIGINT make. It wakes the main loop."""

    def __init__(self, wake: WakeUp) -> None:
        self._wake = wake
        self.received = False

    def listen(self) -> None:
        """Sets the handlers of both signals."""
        signal.signal(signal.SIGTERM, self._receive)
        signal.signal(signal.SIGINT, self._receive)

    def _receive(self, *_: object) -> None:
        self.received = True
        self._wake.set()


def start_process() -> EngineProcessConfig:
    """Sets up logging and the exit with the parent, and returns the settings that the parent wrote."""
    set_up_logging("engine")
    config = read_config(EngineProcessConfig)
    if config.parent is not None:
        die_with_parent(config.parent)
    return config


def log_failed_start(error: Exception) -> None:
    """Logs why the engine can't start; the node shows the log's last error as its reason. Unexpected errors are logged
    with their stack trace. After a ValueError another start would fail, too."""
    extra = {"reason": str(error) or type(error).__name__, "permanent": isinstance(error, ValueError)}
    log.error(f"engine{CAN_NOT_START}", extra=extra, exc_info=not isinstance(error, (ValueError, OSError)))
