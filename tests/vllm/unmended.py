"""The engine process with vLLM's own LoRA functions: on a CPU, 0.32 mixes rows."""

from __future__ import annotations

from node_agent.collector import end
from node_agent.vllm import process, worker_extension
from node_agent.vllm.spawned import begin_spawned

if __name__ == "__mp_main__":
    begin_spawned()


class Unmended(worker_extension.WorkerExtension):
    """Extension that leaves vLLM as it is."""

    def garnish_start(self) -> bool:
        return False


if __name__ == "__main__":
    worker_extension.NAME = "tests.vllm.unmended.Unmended"
    end(process.main())
