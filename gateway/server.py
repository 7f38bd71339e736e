"""Runs the application under gunicorn: the arbiter restarts workers that die, and stops them within a time limit."""

from __future__ import annotations

import asyncio
import gc
import logging
import mmap
import os
import time
from functools import partial
from typing import Any, ClassVar

from gunicorn.app.base import BaseApplication
from gunicorn.arbiter import Arbiter
from gunicorn.config import Config
from gunicorn.errors import HaltServer
from gunicorn.glogging import Logger
from starlette.applications import Starlette
from uvicorn_worker import UvicornWorker

from cluster.descriptors import raise_limit
from cluster.lifeline import die_with_parent
from cluster.logs import log_handler, set_up_logging
from cluster.redis_link import RedisAway, check_redis
from gateway.background import background
from gateway.base_wait import wait_for_base
from gateway.config import ConfigError, GatewayConfig, check_config
from gateway.http.protocol import GatewayHttp
from gateway.workers.metrics_memory import MetricsMemory, NoMetricsMemory

PROCESS = "gateway"
MEMORY_FOLDER = "/dev/shm"  # noqa: S108  (gunicorn makes the files by mkstemp, and removes their names at once)
"""Folder for the files by which workers show gunicorn that they live. The files have no content, so a full disk or a
read-only one does not matter, and neither does a full /dev/shm."""
HEARTBEAT_SECONDS = 120
"""Seconds for which a worker's event loop may stall before the worker is killed and replaced."""
COLLECT = (5_000, 20, 100)
"""Thresholds of Python's garbage collector. Most objects of a request are freed by reference counting."""
KILL_SLACK = 10
"""Seconds from the end of the grace period for open requests until a worker that still runs is killed."""
FIRST_PAUSE, MAX_PAUSE = 1.0, 30.0
"""Seconds after which a worker that could not start is started again. The pause doubles with each further failure."""
FORGET_SECONDS = 300.0
"""Seconds without a failure after which the pause is FIRST_PAUSE again."""

log = logging.getLogger("gateway")


def run(config: GatewayConfig) -> None:
    """Serves until SIGTERM or SIGINT, then exits the process. Raises ConfigError before a socket is bound."""
    check_config(config)
    set_up_logging(PROCESS)
    raise_limit()
    if config.redis is not None:
        try:
            check_redis(config.redis)
        except RedisAway as error:
            raise ConfigError(f"redis: {error}") from None
    try:
        memory = MetricsMemory() if config.workers > 1 else None
    except NoMetricsMemory as error:
        raise ConfigError(f"workers: {error}") from None
    if wait_for_base(config):
        _Server(config, memory).run()


def _collect_less() -> None:
    """Reduces the work of the garbage collector, which would pause all streams.

    Current objects become permanent and are not scanned again. Objects of streams are scanned every few minutes instead
    of every few seconds.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT)


def _tell_start(config: GatewayConfig, _: Arbiter) -> None:
    """Logs that the socket is bound, before workers start."""
    log.info("listening", extra={"host": config.host, "port": config.port, "workers": config.workers})


class _Arbiter(Arbiter):  # type: ignore[misc]
    """Arbiter that survives workers which can't start, as long as others serve.

    gunicorn's own ends the whole gateway, so that a wrong setting is seen at once. But once a worker has served, the
    settings are right, and what a new worker lacks may come back: the registry, memory, or a descriptor.
    """

    def __init__(self, app: _Server) -> None:
        super().__init__(app)
        self._pause = FIRST_PAUSE
        self._failed_at = self._start_at = float("-inf")
        """Times of the latest failed start, and before which none is tried, in monotonic seconds."""

    def reap_workers(self) -> None:
        """Records the ends of workers. Raises HaltServer if one could not start, and none has served or none is
        left."""
        while True:
            before = dict(self.WORKERS)
            try:
                super().reap_workers()
                return
            except HaltServer:
                for pid in before.keys() - self.WORKERS.keys():
                    before[pid].tmp.close()
                    self.cfg.child_exit(self, before[pid])
                if not self.LISTENERS:  # the gateway is stopping
                    continue
                if not (self.WORKERS and self.app.has_served):
                    raise
                self._record_failure("it ended during its start")

    def spawn_worker(self) -> int:
        self.app.slot = None
        try:
            return int(super().spawn_worker())
        except OSError:
            self.app.return_slot()
            raise

    def spawn_workers(self) -> None:
        """Starts the missing workers, unless one could not start just now."""
        if time.monotonic() < self._start_at:
            return
        try:
            super().spawn_workers()
        except OSError as error:  # for instance, the host has no memory or no descriptor for another process
            if not (self.WORKERS and self.app.has_served):
                raise
            self._record_failure(error.strerror or "I/O error")

    def _record_failure(self, why: str) -> None:
        now = time.monotonic()
        is_first = now - self._failed_at > FORGET_SECONDS
        self._pause = FIRST_PAUSE if is_first else min(MAX_PAUSE, 2 * self._pause)
        self._failed_at, self._start_at = now, now + self._pause
        extra = {"why": why, "again_in_s": self._pause, "others": len(self.WORKERS)}
        log.error("a worker could not start, and is started again; the others continue", extra=extra)

    def stop(self, graceful: bool = True) -> None:  # noqa: ARG002
        """Stops the workers by SIGTERM, whatever the signal was.

        For SIGINT and SIGQUIT gunicorn would send them SIGQUIT, which uvicorn's workers ignore, and would wait until it
        may kill them.
        """
        super().stop(graceful=True)


class _Server(BaseApplication):  # type: ignore[misc]
    def __init__(self, config: GatewayConfig, memory: MetricsMemory | None) -> None:
        """`memory`: for the workers' metrics, if there are several workers."""
        self._config = config
        self._memory = memory
        self.slot: int | None = None
        """Slot of this worker in `memory`, or in the arbiter that of the worker that is being started."""
        self._served = mmap.mmap(-1, 1)
        """Byte that workers share with the arbiter: 1 once one of them was ready."""
        super().__init__()

    @property
    def has_served(self) -> bool:
        """Returns whether any worker has been ready."""
        return self._served[0] == 1

    def run(self) -> None:
        _Arbiter(self).run()

    def load_config(self) -> None:
        config = self._config
        settings: dict[str, Any] = {
            "bind": f"[{config.host}]:{config.port}" if ":" in config.host else f"{config.host}:{config.port}",
            "workers": config.workers,
            "worker_class": _worker_class(config),
            "preload_app": False,
            "timeout": HEARTBEAT_SECONDS,
            "graceful_timeout": int(config.shutdown_seconds) + KILL_SLACK,
            "keepalive": 30,
            "accesslog": None,
            "loglevel": "warning",  # normal starts are logged by our own code
            "logger_class": _OurLogger,
            "control_socket_disable": True,
            "worker_tmp_dir": MEMORY_FOLDER if os.access(MEMORY_FOLDER, os.W_OK) else None,
            "proc_name": "garnish-gateway",
            "pre_fork": self._take_slot,
            "child_exit": self._release_slot,
            "when_ready": partial(_tell_start, config),
        }
        for name, value in settings.items():
            self.cfg.set(name, value)

    def _take_slot(self, _: Arbiter, worker: UvicornWorker) -> None:
        """Assigns the worker that is forked next a slot for its metrics. Without a free one its metrics are not
        shown."""
        if self._memory is not None:
            self.slot = worker.metrics_slot = self._memory.take()

    def return_slot(self) -> None:
        """Frees the slot of a worker that could not be forked."""
        if self._memory is not None and self.slot is not None:
            self._memory.release(self.slot)
        self.slot = None

    def _release_slot(self, _: Arbiter, worker: UvicornWorker) -> None:
        """Frees the slot of a worker that has ended, once: its gauges end, its counters stay."""
        if self._memory is not None and worker.metrics_slot is not None:
            self._memory.release(worker.metrics_slot)
            worker.metrics_slot = None

    def _started(self) -> None:
        """Tunes the garbage collector, and says that the worker can take requests."""
        _collect_less()
        self._served[0] = 1
        log.info("worker is ready", extra={"pid": os.getpid()})

    def load(self) -> Starlette:
        # Imported in the worker, so that a reload loads new code.
        from gateway.app import create_app
        from gateway.workers.metrics import Metrics
        from gateway.workers.shared_values import use_slot

        if self._memory is not None and self.slot is not None:
            use_slot(self._memory.slot(self.slot))
        return create_app(self._config, started=self._started, metrics=Metrics(self._memory))


class _OurLogger(Logger):  # type: ignore[misc]
    """Logger that writes log lines of gunicorn and uvicorn in our format."""

    def setup(self, cfg: Config) -> None:
        super().setup(cfg)
        for handler in self.error_log.handlers:
            handler.setFormatter(log_handler(PROCESS).formatter)


def _worker_class(config: GatewayConfig) -> type[UvicornWorker]:
    class Worker(UvicornWorker):  # type: ignore[misc]
        CONFIG_KWARGS: ClassVar[dict[str, Any]] = {
            "loop": "uvloop",
            "http": GatewayHttp,
            "ws": "none",
            "lifespan": "on",
            "server_header": False,
            "timeout_graceful_shutdown": int(config.shutdown_seconds),
            # No limit here: the boundary refuses further requests with a proper reply.
            "limit_concurrency": None,
        }

        async def _serve(self) -> None:
            async with background(self._beat):
                await super()._serve()

        async def _beat(self) -> None:
            """Notifies the arbiter that the worker is alive.

            uvicorn does so only until it begins to stop, while open streams may last much longer.
            """
            while True:
                self.notify()
                await asyncio.sleep(HEARTBEAT_SECONDS / 4)

        def init_process(self) -> None:
            die_with_parent(self.ppid)  # a killed arbiter must not leave a worker that holds the port
            super().init_process()

    return Worker
