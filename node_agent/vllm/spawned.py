"""First steps of a process that vLLM starts. The main module of a program that drives vLLM takes them before its other
imports, where it is imported as `__mp_main__`."""

from __future__ import annotations

import multiprocessing
import os

from cluster.lifeline import die_with_parent
from node_agent.vllm.logs import take_logs


def begin_spawned() -> None:
    """Ends this process with the one that started it, and sends its logs to the node's."""
    die_with_parent(os.getppid())
    take_logs(multiprocessing.current_process().name)
