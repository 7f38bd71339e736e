"""The engine process with a short measurement that begins as soon as nobody calls."""

from __future__ import annotations

import os

from cluster import performance_file
from cluster.lifeline import die_with_parent
from node_agent import engine_loop
from node_agent.collector import end
from node_agent.performance import idle_base
from node_agent.performance.cases import Effort
from node_agent.vllm import process
from node_agent.vllm.measuring import idle

if __name__ == "__mp_main__":
    die_with_parent(os.getppid())

if __name__ == "__main__":
    idle.IDLE = Effort((1, 2, 4, 8), (8, 32), 1, (8, 16, 24, 32, 48, 64), 2, 512)
    idle.MAX_ERROR_IDLE = performance_file.MAX_ERROR_IDLE = float("inf")  # the host may be busy with other tests
    engine_loop.QUIET_S = 0.3
    idle_base.SHARED_PAUSE_S = 0.1
    end(process.main())
