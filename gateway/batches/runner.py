"""Runs batches: claims them, starts their calls while nodes have spare rows, and completes them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from time import monotonic

import msgspec
from prometheus_client import CollectorRegistry

from adapters.errors import NotFound, StoreUnavailable
from adapters.store import ObjectStore
from cluster.state import ClusterState
from gateway.background import background, cancel_all
from gateway.batches.files import FileStore
from gateway.batches.lines import Line
from gateway.batches.messages import BatchProblem, Endpoint
from gateway.batches.metrics import BatchMetrics
from gateway.batches.records import BatchRecord, BatchStore
from gateway.batches.replies import AGAIN, FLEETING, Answer
from gateway.batches.run import BatchRun, CheckForm, LeaseLost
from gateway.batches.spare import SpareRows
from gateway.catalog.callers import Callers
from gateway.catalog.threads import LeavableThreads
from gateway.jobs.clocks import ChangeWatch
from gateway.jobs.job_store import Marker, Stored
from gateway.jobs.poller import Poller, PollResult
from gateway.jobs.shares import Shares
from gateway.jobs.windows import MAX_PAUSE_S, Function
from gateway.places.places import Places, owner_now

LEASE_SECONDS = 10.0
"""Seconds after which another gateway may claim a batch whose record has not changed."""
POLL_SECONDS = 3.0
FLUSH_SECONDS = 1.0
MAX_RUNS = 16
"""Maximum batches that one gateway worker runs at once. A batch of 50,000 lines needs about 1 MB for their
positions."""
MAX_READS_A_POLL = 64
MAX_IN_FLIGHT = 512
MAX_IN_FLIGHT_PER_TENANT = 256
BURST = 8
"""Maximum calls that start before spare rows are counted again. Nodes report a new call with a delay."""
TICK_SECONDS = 0.02
IDLE_SECONDS = 0.2
PAUSE_SECONDS = 1.0
"""Seconds until a call that could not run is tried again, unless the error states them."""
ATTEMPTS = 3

AnswerLine = Callable[[str, Endpoint, Line, str], Awaitable[Answer]]
"""Function that returns the answer to a line. It gets the tenant, endpoint, line and request id."""
Key = tuple[str, str]

log = logging.getLogger("gateway")


class BatchRunner:
    """Runner of one gateway worker.

    `clock`: monotonic seconds. `unix` returns Unix time (store clock). `spare` gets the number of calls in progress and
    returns how many more may start. `places`: for accesses to the store, as in LeavableThreads.
    """

    def __init__(
        self,
        batches: BatchStore,
        files: FileStore,
        callers: Callers,
        *,
        name: str,
        spare: Callable[[int], Awaitable[float]],
        registry: CollectorRegistry,
        clock: Callable[[], float],
        unix: Callable[[], Awaitable[float]],
        check_form: CheckForm,
        places: Places | int = 8,
    ) -> None:
        self._check_form = check_form
        self._batches, self._files, self._callers, self._spare = batches, files, callers, spare
        self._name, self._clock, self._unix = name, clock, unix
        self._metrics = BatchMetrics(registry)
        self._threads = LeavableThreads(places)
        self._shares = Shares(clock, at_once=MAX_IN_FLIGHT_PER_TENANT, weighted=True)
        self._poller = Poller("batch", self._poll, self._owner, self._claim, at_once=MAX_RUNS, idle_s=POLL_SECONDS)
        self._lease_watch = ChangeWatch(clock)
        self._runs: dict[Key, BatchRun] = {}
        self._under_way: set[asyncio.Task[None]] = set()
        self._reading: set[asyncio.Task[None]] = set()
        """Calls whose lines are being read; nodes do not report them yet."""
        self._paused_until = 0.0
        self._room = asyncio.Event()

    @asynccontextmanager
    async def running(self, answer: AnswerLine) -> AsyncIterator[None]:
        """Runs batches as long as the context lasts, then releases them."""

        async def begin_calls() -> None:
            while True:
                count = await self._begin_calls(answer)
                await _wait(self._room, TICK_SECONDS if count else IDLE_SECONDS, at_least=TICK_SECONDS)

        try:
            async with background(self._poller.run, self._make_room, begin_calls):
                yield
        finally:
            await cancel_all(self._poller.active.values())

    def wake(self) -> None:
        """Polls and writes immediately, because a batch is new or must be cancelled."""
        self._poller.wake.set()
        for run in self._runs.values():
            run.changed.set()

    async def _poll(self, _after: str, _closed: Collection[Function]) -> PollResult:
        """Returns batches without a holder."""
        markers = await self._threads.run(self._batches.open_batches)
        self._metrics.open.set(len(markers))
        waiting = [marker for marker in markers if marker.id not in self._poller.active]
        self._lease_watch.retain([marker.id for marker in markers])
        running = Counter(tenant for tenant, _ in self._runs)
        waiting.sort(key=lambda marker: (not self._is_unchanged(marker.id), running[marker.tenant]))
        claimable: dict[str, list[Marker]] = {}
        for marker in waiting[:MAX_READS_A_POLL]:
            stored = await self._owner(marker)
            self._lease_watch.observe(marker.id, stored.etag if stored else "")
            if stored is not None and self._is_claimable(stored.record):
                claimable.setdefault(marker.tenant, []).append(marker)
        return PollResult(claimable)

    async def _make_room(self) -> None:
        """Releases one batch of a tenant with several running ones, if a tenant without a running batch waits. Runs
        until cancelled."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            if len(self._runs) < MAX_RUNS:
                continue
            with suppress(StoreUnavailable):
                waiting = set((await self._poll("", ())).queues)
                running = Counter(tenant for tenant, _ in self._runs)
                for tenant, count in running.most_common(1):
                    if count > 1 and waiting - running.keys():
                        newest = min(key for key in self._runs if key[0] == tenant)
                        self._runs[newest].give_up()

    async def _owner(self, marker: Marker) -> Stored[BatchRecord] | None:
        return await self._threads.run(partial(self._batches.owner, marker))

    async def _claim(self, stored: Stored[BatchRecord]) -> None:
        """Claims the batch if it has no holder, and runs it until it has ended or is released."""
        record = stored.record
        self._lease_watch.observe(record.id, stored.etag)
        if not self._is_claimable(record):
            return
        claim = msgspec.structs.replace(record, holder=self._name, claim=record.claim + 1)
        claimed = await self._threads.run(partial(self._batches.change, stored, claim))
        if claimed is not None:
            run = BatchRun(claimed, self._batches, self._files, self._threads, self._unix, self._check_form)
            await self._drive(run)

    def _is_claimable(self, record: BatchRecord) -> bool:
        return not record.holder or self._is_unchanged(record.id)

    def _is_unchanged(self, batch_id: str) -> bool:
        """Returns whether the batch's lease has ended: its record has not changed for LEASE_SECONDS, or was never
        read."""
        return self._lease_watch.unchanged_s(batch_id) >= LEASE_SECONDS

    async def _drive(self, run: BatchRun) -> None:
        """Runs a claimed batch until it has ended or is released."""
        self._runs[run.key] = run
        self._metrics.running.set(len(self._runs))
        try:
            await self._carry(run)
        except LeaseLost:
            log.warning(
                "this worker stops a batch: another gateway has claimed it, or it was deleted",
                extra={"batch": run.record.id},
            )
            run.lost = True
        except Exception as error:  # another gateway would fail in the same way
            log.error("a batch failed", exc_info=error, extra={"batch": run.record.id})
            await cancel_all(run.calls)
            run.end("failed", BatchProblem("internal_error", "an unexpected error; the operator finds it in the log"))
            with suppress(LeaseLost):
                await self._finish(run)
        finally:
            await cancel_all(run.calls)
            with suppress(StoreUnavailable, LeaseLost, TimeoutError):  # then the lease ends by itself
                async with asyncio.timeout(LEASE_SECONDS):
                    await run.release()
            del self._runs[run.key]
            self._shares.keep({tenant for tenant, _ in self._runs})
            self._metrics.running.set(len(self._runs))

    async def _carry(self, run: BatchRun) -> None:
        try:
            await self._insist(run, run.scan)
        except NotFound:
            run.end("failed", _deleted_input())
        self._room.set()
        while run.ending is None and not run.given_up:
            await _wait(run.changed, FLUSH_SECONDS)
            await self._insist(run, lambda: self._tend(run))
        await cancel_all(run.calls)
        if run.ending is not None:
            await self._finish(run)

    async def _finish(self, run: BatchRun) -> None:
        """Completes the batch. Raises LeaseLost."""
        await self._insist(run, run.finish)
        self._metrics.count_end(run.record.status)

    async def _tend(self, run: BatchRun) -> None:
        """Writes new answers and renews the lease. Ends the batch if it is complete or expired, or if its key is
        revoked."""
        record = run.record
        if run.all_answered:
            run.end("completed")
        elif await self._unix() >= record.expires:
            run.end("expired")
        elif record.key_id is not None:
            owner = None if record.by_admin else record.tenant
            if not await self._callers.is_valid(owner, record.key_id):
                run.end("cancelled", BatchProblem("key_revoked", "the key that made the batch was revoked"))
        await self._learn_weight(record.tenant)
        await run.write()

    async def _learn_weight(self, tenant: str) -> None:
        with suppress(NotFound):  # then its batches are gone, too
            self._shares.weights[tenant] = (await self._callers.account(tenant)).weight

    async def _insist(self, run: BatchRun, work: Callable[[], Awaitable[None]]) -> None:
        """Runs `work`, and repeats it while the store is unavailable. Raises LeaseLost if the lease expires
        meanwhile."""
        while True:
            try:
                return await work()
            except StoreUnavailable as error:
                if self._clock() - run.written_at >= LEASE_SECONDS:
                    raise LeaseLost from error
                log.warning(
                    "a batch waits: the registry is unavailable", extra={"batch": run.record.id, "why": str(error)}
                )
            await asyncio.sleep(FLUSH_SECONDS)

    async def _begin_calls(self, answer: AnswerLine) -> int:
        """Starts calls while nodes have spare rows. Returns the number of started calls."""
        if not self._runs or self._clock() < self._paused_until:
            return 0
        begun_before = len(self._under_way)
        room = min(BURST, MAX_IN_FLIGHT - begun_before, await self._spare(begun_before) - len(self._reading))
        for count in range(int(room)):
            run = self._next_run()
            index = None if run is None else run.next_call()
            if run is None or index is None:
                return count
            self._start_call(run, index, answer)
        return int(room)

    def _next_run(self) -> BatchRun | None:
        """Returns the batch whose call starts next: the oldest batch of the tenant whose turn it is. Returns None if no
        call may start."""
        oldest: dict[str, BatchRun] = {}
        for (tenant, batch_id), run in self._runs.items():
            is_fresh = self._clock() - run.written_at < LEASE_SECONDS / 2
            if not (is_fresh and run.has_calls and self._shares.may_begin(_all_functions(tenant))):
                continue
            if tenant not in oldest or batch_id > oldest[tenant].record.id:  # ids count down
                oldest[tenant] = run
        chosen = self._shares.pick(oldest)
        return None if chosen is None else oldest[chosen]

    def _start_call(self, run: BatchRun, index: int, answer: AnswerLine) -> None:
        task, functions = asyncio.create_task(self._run_call(run, index, answer)), _all_functions(run.record.tenant)
        self._shares.begin(functions)
        owners = (run.calls, self._under_way, self._reading)
        for owner in owners:
            owner.add(task)

        def end(_: asyncio.Task[None]) -> None:  # also runs for a task that was cancelled before it started
            for owner in owners:
                owner.discard(task)
            self._shares.end(functions)
            self._room.set()

        task.add_done_callback(end)

    async def _run_call(self, run: BatchRun, index: int, answer: AnswerLine) -> None:
        tenant, number, task = run.record.tenant, run.line_number(index), asyncio.current_task()
        assert task is not None
        owner_now.set(tenant)
        try:
            line = await run.line(index)
            self._reading.discard(task)
            answered = await answer(tenant, run.record.endpoint, line, f"{run.record.id}-{number}")
            self._settle(run, index, line.custom_id, answered)
        except NotFound:
            run.end("failed", _deleted_input())
        except StoreUnavailable:
            run.put_back(index, PAUSE_SECONDS)
        except Exception as error:
            log.error("a call of a batch failed", exc_info=error, extra={"batch": run.record.id, "line": number})
            run.end("failed", BatchProblem("internal_error", "an unexpected error", number))

    def _settle(self, run: BatchRun, index: int, custom_id: str, answer: Answer) -> None:
        functions, tries = _all_functions(run.record.tenant), run.attempts.get(index, 0) + 1
        if answer.error in AGAIN or (answer.error in FLEETING and tries < ATTEMPTS):
            pause = min(answer.retry_after or PAUSE_SECONDS, MAX_PAUSE_S)
            if answer.error == "rate_limited":
                self._shares.record_refusal(functions, pause)
            elif answer.error == "overloaded":
                self._paused_until = self._clock() + min(pause, PAUSE_SECONDS)
            elif answer.error in FLEETING:
                run.attempts[index] = tries
            run.put_back(index, pause)
            self._metrics.count_call("put_back")
        else:
            run.record_answer(index, custom_id, answer.reply)
            self._shares.windows.record_acceptance(functions)
            self._metrics.count_call("failed" if answer.error else "completed")


@dataclass(frozen=True)
class Batches:
    """Files and batches of all tenants. `runner` runs those batches that this worker claims."""

    files: FileStore
    records: BatchStore
    runner: BatchRunner


def make_batches(
    store: ObjectStore,
    cluster: ClusterState,
    callers: Callers,
    *,
    base: str,
    name: str,
    registry: CollectorRegistry,
    unix: Callable[[], Awaitable[float]],
    check_form: CheckForm,
    places: Places,
) -> Batches:
    """Returns the batches of a gateway worker.

    `base`: fingerprint of the base model. `name`: unique among all gateways' workers. `registry`: of the Prometheus
    metrics. `unix` returns Unix time (store clock). `check_form`: as in BatchRun. `places`: for accesses to the store.
    """
    files, records, rows = FileStore(store), BatchStore(store), SpareRows(monotonic)

    async def spare(in_flight: int) -> float:
        return rows.count(await cluster.table(), base, in_flight)

    runner = BatchRunner(
        records,
        files,
        callers,
        name=name,
        spare=spare,
        registry=registry,
        clock=monotonic,
        unix=unix,
        check_form=check_form,
        places=places,
    )
    return Batches(files, records, runner)


def _all_functions(tenant: str) -> Function:
    """Returns the key by which the calls of all functions of a tenant share one maximum."""
    return tenant, ""


async def _wait(event: asyncio.Event, seconds: float, at_least: float = 0.0) -> None:
    """Waits until the event is set, at most `seconds` seconds, and then clears it."""
    await asyncio.sleep(at_least)
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    event.clear()


def _deleted_input() -> BatchProblem:
    return BatchProblem("input_file_deleted", "the input file was deleted before all of its calls had run")
