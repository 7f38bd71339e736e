"""Claims batches, begins their calls while nodes have rows to spare, and sees each batch to its end."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import msgspec
from prometheus_client import CollectorRegistry

from adapters.errors import CorruptRecord, NotFound, StoreUnavailable
from gateway.background import background, cancel_all
from gateway.batches.answers import AGAIN, FLEETING, Answer
from gateway.batches.files import FileStore
from gateway.batches.lines import Line
from gateway.batches.messages import BatchProblem, Endpoint
from gateway.batches.metrics import BatchMetrics
from gateway.batches.records import BatchStore, Held
from gateway.batches.run import BatchRun, LeaseLost
from gateway.batches.shares import PAUSE_SECONDS, Shares
from gateway.catalog.callers import Callers
from gateway.catalog.threads import LeavableThreads

LEASE_SECONDS = 10.0
"""A batch whose record has not changed for so long, by the clock of who looks, may be taken over."""
POLL_SECONDS = 3.0
"""Between two looks for batches to claim."""
FLUSH_SECONDS = 1.0
MAX_RUNS = 16
"""Batches at once in one gateway worker: each keeps where its lines are, about 1 MB for 50,000."""
MAX_LOOKS = 64
"""Records that are read in one look for batches."""
MAX_IN_FLIGHT = 512
BURST = 8
"""Calls that begin at once, before nodes are looked at again: a call has a place on a node only a moment later."""
TICK_SECONDS = 0.02
IDLE_SECONDS = 0.2
ATTEMPTS = 3
THREADS = 8

AnswerLine = Callable[[str, Endpoint, Line, str], Awaitable[Answer]]
"""Answers a tenant's line; its last argument is the request's id."""
Key = tuple[str, str]
"""Tenant and batch."""

log = logging.getLogger("gateway")


class BatchRunner:
    """`clock` is monotonic seconds, `unix` Unix time by the store's clock; `spare` says how many calls more may begin,
    when so many are under way."""

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
    ) -> None:
        self._batches, self._files, self._callers, self._spare = batches, files, callers, spare
        self._name, self._clock, self._unix = name, clock, unix
        self._metrics = BatchMetrics(registry)
        self._threads = LeavableThreads(THREADS)
        self._shares = Shares(clock)
        self._runs: dict[Key, BatchRun] = {}
        self._drives: set[asyncio.Task[None]] = set()
        self._lines: dict[Key, set[asyncio.Task[None]]] = {}
        self._seen: dict[Key, tuple[str, float]] = {}
        """The etags of batches that others hold, and since when each was seen."""
        self._under_way: set[asyncio.Task[None]] = set()
        """Calls that have begun."""
        self._reading: set[asyncio.Task[None]] = set()
        """Those of them that no node knows of, because their lines are still being read."""
        self._paused_until = 0.0
        self._look, self._room = asyncio.Event(), asyncio.Event()

    @asynccontextmanager
    async def running(self, answer: AnswerLine) -> AsyncIterator[None]:
        """Runs batches as long as the context lasts, then leaves them to others."""

        async def begin_calls() -> None:
            while True:
                begun = await self._begin_calls(answer)
                await _wait(self._room, TICK_SECONDS if begun else IDLE_SECONDS, at_least=TICK_SECONDS)

        try:
            async with background(self._claim_turns, begin_calls):
                yield
        finally:
            await cancel_all(self._drives)

    def wake(self) -> None:
        """A batch has come, or is to be cancelled."""
        self._look.set()
        for run in self._runs.values():
            run.changed.set()

    async def _claim_turns(self) -> None:
        while True:
            self._look.clear()
            try:
                await self._claim()
            except StoreUnavailable as error:
                log.warning("batches can't be looked for", extra={"why": str(error)})
            await _wait(self._look, POLL_SECONDS)

    async def _claim(self) -> None:
        found = await self._threads.run(self._batches.open_batches)
        self._metrics.open.set(len(found))
        waiting = [key for key in found if key not in self._runs]
        self._seen = {key: self._seen[key] for key in waiting if key in self._seen}
        due = {key for key in waiting if key not in self._seen or self._is_stale(key)}
        held = Counter(tenant for tenant, _ in self._runs)
        ordered = sorted(waiting, key=lambda each: (each not in due, held[each[0]]))
        for key in ordered[:MAX_LOOKS]:
            if len(self._runs) >= MAX_RUNS:
                break
            try:
                await self._try(key)
            except CorruptRecord as error:  # the others' turn comes all the same
                log.error("a batch can't be run", extra={"batch": key[1], "why": str(error)})
                self._seen[key] = "", self._clock()
        if len(self._runs) >= MAX_RUNS:
            self._make_room({tenant for tenant, _ in due})

    def _make_room(self, waiting: set[str]) -> None:
        """Gives a batch back where one tenant has several and another, that waits, none."""
        held = Counter(tenant for tenant, _ in self._runs)
        tenant, count = held.most_common(1)[0]
        if count > 1 and waiting - set(held):
            newest = min(key for key in self._runs if key[0] == tenant)
            self._runs[newest].give_up()

    async def _try(self, key: Key) -> None:
        """Claims the batch if nobody holds it."""
        held = await self._threads.run(lambda: self._batches.read(*key))
        if held is None:
            await self._threads.run(lambda: self._batches.drop_orphan(*key))
            return
        record = held.record
        if record.ended:
            await self._threads.run(lambda: self._batches.close(*key))
            return
        if self._seen.get(key, ("", 0.0))[0] != held.etag:
            self._seen[key] = held.etag, self._clock()
        if record.holder and not self._is_stale(key):
            return
        record = msgspec.structs.replace(record, holder=self._name, claim=record.claim + 1)
        claimed = await self._threads.run(lambda: self._batches.write(record, held.etag))
        if claimed is not None:
            self._start(key, claimed)

    def _is_stale(self, key: Key) -> bool:
        return self._clock() - self._seen[key][1] >= LEASE_SECONDS

    def _start(self, key: Key, claimed: Held) -> None:
        run = self._runs[key] = BatchRun(claimed, self._batches, self._files, self._threads, self._unix)
        self._lines[key] = set()
        drive = asyncio.create_task(self._drive(key, run))
        self._drives.add(drive)
        drive.add_done_callback(self._drives.discard)
        self._metrics.running.set(len(self._runs))

    async def _drive(self, key: Key, run: BatchRun) -> None:
        """Owns the run, from its claim until it has ended or is left to others."""
        try:
            await self._carry(key, run)
        except LeaseLost:
            log.warning("another gateway has this batch, or it was deleted", extra={"batch": key[1]})
            run.lost = True
        except Exception as error:  # nobody else could do better
            log.error("a batch failed", exc_info=error, extra={"batch": key[1]})
            await cancel_all(self._lines[key])
            run.end("failed", BatchProblem("internal_error", "an unexpected error; the operator finds it in the log"))
            with suppress(LeaseLost):
                await self._finish(run)
        finally:
            await cancel_all(self._lines[key])
            with suppress(StoreUnavailable, LeaseLost, TimeoutError):  # then the lease ends by itself
                async with asyncio.timeout(LEASE_SECONDS):
                    await run.release()
            del self._runs[key], self._lines[key]
            self._shares.keep(tenant for tenant, _ in self._runs)
            self._metrics.running.set(len(self._runs))
            self._look.set()

    async def _carry(self, key: Key, run: BatchRun) -> None:
        try:
            await self._insist(run, run.scan)
        except NotFound:
            run.end("failed", _deleted_input())
        self._room.set()
        while run.ending is None and not run.given_up:
            await _wait(run.changed, FLUSH_SECONDS)
            await self._insist(run, lambda: self._tend(run))
        await cancel_all(self._lines[key])
        if run.ending is not None:
            await self._finish(run)

    async def _finish(self, run: BatchRun) -> None:
        """Finishes the batch: writes its answers and its end. Raises LeaseLost."""
        await self._insist(run, run.finish)
        self._metrics.count_end(run.record.status)

    async def _tend(self, run: BatchRun) -> None:
        """Keeps the lease and what was answered, and ends the batch when it is time to."""
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
            self._shares.of(tenant).weight = (await self._callers.account(tenant)).weight

    async def _insist(self, run: BatchRun, work: Callable[[], Awaitable[None]]) -> None:
        """Does `work`, again while the store is away. Raises LeaseLost when the lease has ended meanwhile."""
        while True:
            try:
                return await work()
            except StoreUnavailable as error:
                if self._clock() - run.written_at >= LEASE_SECONDS:
                    raise LeaseLost from error
                log.warning("a batch waits for the store", extra={"batch": run.record.id, "why": str(error)})
            await asyncio.sleep(FLUSH_SECONDS)

    async def _begin_calls(self, answer: AnswerLine) -> int:
        """Begins calls as far as there are rows for them. Returns how many."""
        if not self._runs or self._clock() < self._paused_until:
            return 0
        begun_before = len(self._under_way)
        room = min(BURST, MAX_IN_FLIGHT - begun_before, await self._spare(begun_before) - len(self._reading))
        for begun in range(int(room)):
            fresh = (run for run in self._runs.values() if self._clock() - run.written_at < LEASE_SECONDS / 2)
            run = self._shares.pick(fresh)
            index = None if run is None else run.next_call()
            if run is None or index is None:
                return begun
            self._start_call(run, index, answer)
        return int(room)

    def _start_call(self, run: BatchRun, index: int, answer: AnswerLine) -> None:
        key, task = run.key, asyncio.create_task(self._run_call(run, index, answer))
        self._shares.begin(run.record.tenant)
        owners = (self._lines[key], self._under_way, self._reading)
        for owner in owners:
            owner.add(task)

        def end(_: asyncio.Task[None]) -> None:  # also of a task that was cancelled before it ran
            for owner in owners:
                owner.discard(task)
            self._shares.end(key[0])
            self._room.set()

        task.add_done_callback(end)

    async def _run_call(self, run: BatchRun, index: int, answer: AnswerLine) -> None:
        tenant, number, task = run.record.tenant, run.line_number(index), asyncio.current_task()
        assert task is not None
        try:
            line = await run.line(index)
            self._reading.discard(task)
            told = await answer(tenant, run.record.endpoint, line, f"{run.record.id}-{number}")
            self._settle(run, index, line.custom_id, told)
        except NotFound:
            run.end("failed", _deleted_input())
        except StoreUnavailable:
            run.put_back(index, PAUSE_SECONDS)
        except Exception as error:
            log.error("a call of a batch failed", exc_info=error, extra={"batch": run.record.id, "line": number})
            run.end("failed", BatchProblem("internal_error", "an unexpected error", number))

    def _settle(self, run: BatchRun, index: int, custom_id: str, told: Answer) -> None:
        share, tries = self._shares.of(run.record.tenant), run.attempts.get(index, 0) + 1
        if told.error in AGAIN or (told.error in FLEETING and tries < ATTEMPTS):
            pause = told.retry_after or PAUSE_SECONDS
            if told.error == "rate_limited":
                pause = share.refuse(self._clock(), told.retry_after)
            elif told.error == "overloaded":
                self._paused_until = self._clock() + min(pause, PAUSE_SECONDS)
            elif told.error in FLEETING:
                run.attempts[index] = tries
            run.put_back(index, pause)
            self._metrics.count_call("put_back")
        else:
            run.note(index, custom_id, told.reply)
            share.grow()
            self._metrics.count_call("failed" if told.error else "completed")


async def _wait(event: asyncio.Event, seconds: float, at_least: float = 0.0) -> None:
    """Returns when the event is set, which it then is no more, or after so many seconds."""
    await asyncio.sleep(at_least)
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    event.clear()


def _deleted_input() -> BatchProblem:
    return BatchProblem("input_file_deleted", "the input file was deleted before all of its calls had run")
