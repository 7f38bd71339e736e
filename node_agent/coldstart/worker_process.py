"""Process of a CPU LoRA worker. It computes LoRA terms of the tokens handed to it, with one thread on one core, and
never uses a GPU. A spare worker may run on the core of any other one.

The process maps the inherited host tier and handoff memory, reports on standard output when it is warm, and blocks
until it is armed. While armed, it polls its command flags, so that nothing has to wake it. A command that can't be
computed is a bug and ends the process. The engine notices the exit at once and starts another worker.
"""

from __future__ import annotations

import os
import signal
import sys

import msgspec

from node_agent.collector import settle, stop_collecting

if __name__ == "__main__":
    stop_collecting()  # before the imports below load torch

from cluster.lifeline import die_with_parent
from cluster.logs import set_up_logging
from node_agent.child import read_config
from node_agent.coldstart.shared import WorkerConfig, WorkerReady

POLL_NS = 100_000_000
"""Nanoseconds of polling between two checks for signals."""


def main() -> None:
    config = read_config(WorkerConfig)
    die_with_parent(config.parent)
    set_up_logging(f"cpu-worker-{config.index}")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine handles a terminal's Ctrl-C and then ends this process
    report = os.dup(sys.stdout.fileno())  # output of libraries goes to the log
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
