"""First steps of a process that vLLM starts. The main module of a program that drives vLLM takes them before its other
imports, where it is imported as `__mp_main__`."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from pathlib import Path

from cluster.lifeline import die_with_parent
from node_agent.vllm.logs import take_logs
from node_agent.vllm.own_folder import PREFIX, name_shared_memory


def begin_spawned() -> None:
    """Ends this process with the one that started it, names its shared memory after that one's folder, and sends its
    logs to the node's."""
    die_with_parent(os.getppid())
    folder = Path(tempfile.gettempdir())
    if folder.name.startswith(PREFIX):
        name_shared_memory(folder)
    take_logs(multiprocessing.current_process().name)
