"""The engine process with vLLM's own LoRA functions: on a CPU, 0.32 mixes rows."""

from __future__ import annotations

import os

from cluster.lifeline import die_with_parent
from node_agent.collector import end
from node_agent.vllm import process, worker_extension

if __name__ == "__mp_main__":
    die_with_parent(os.getppid())


class Unmended(worker_extension.WorkerExtension):
    """Extension that leaves vLLM as it is."""

    def garnish_start(self) -> bool:
        return False


if __name__ == "__main__":
    worker_extension.NAME = "tests.vllm.unmended.Unmended"
    end(process.main())
