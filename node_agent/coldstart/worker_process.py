"""A CPU LoRA worker: one core (a spare one: any of the workers'), one thread, the adapters' part of the tokens that it
is handed, never a GPU.

It maps the host tier and the handoff memory by inheritance, reports on standard output that it is warm, and then
blocks until it is armed. Armed, it polls its command flags, so that nothing has to wake it. What can't be computed ends
it, for that is a mistake of this program: the engine sees the end at once and starts another.
"""

from __future__ import annotations

import os
import signal
import sys

import msgspec

from node_agent.collector import settle, stop_collecting

if __name__ == "__main__":
    stop_collecting()  # before the next lines load torch

from cluster.lifeline import die_with_parent
from cluster.logs import set_up_logging
from node_agent.child import read_config
from node_agent.coldstart.shared import WorkerConfig, WorkerReady

POLL_NS = 100_000_000
"""An armed worker's look at signals."""


def main() -> None:
    config = read_config(WorkerConfig)
    die_with_parent(config.parent)
    set_up_logging(f"cpu-worker-{config.index}")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the engine, which then ends us
    report = os.dup(sys.stdout.fileno())  # and whatever a library prints goes to the log
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    os.sched_setaffinity(0, config.cores)  # before torch counts the cores
    import torch

    from node_agent.coldstart.worker import Worker, warm_up
    from node_agent.device import flush_denormals

    flush_denormals()
    torch.set_num_threads(1)
    worker = Worker(config)
    warm_up(worker.product, config.layout)
    settle()
    ready = WorkerReady(worker.product.compiled, torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    os.write(report, msgspec.json.encode(ready) + b"\n")
    while True:
        worker.serve_while_armed(POLL_NS)
        os.eventfd_read(config.armed_fd)


if __name__ == "__main__":
    main()
