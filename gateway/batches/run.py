"""Run of a claimed batch: its remaining calls, its answers, and the writes that store both and renew the lease."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from functools import partial
from heapq import heappop, heappush
from typing import Any

import msgspec

from adapters.errors import CorruptRecord, NotFound
from gateway.batches.files import FileRecord, FileStore, piece_starts
from gateway.batches.forms import LineForm
from gateway.batches.line_reader import AHEAD_LINES, LineReader
from gateway.batches.lines import MAX_PROBLEMS, Line, LineScanner
from gateway.batches.messages import BatchProblem, Endpoint, Status
from gateway.batches.records import BatchRecord, BatchStore, bits_for
from gateway.batches.replies import LineReply, PartWriter, reply_line, unanswered_line
from gateway.catalog.threads import LeavableThreads
from gateway.jobs.job_store import Stored

BEAT_SECONDS = 2.0
"""Seconds between two writes of the record that renew the lease during long work, such as reading the input."""
FLUSH_LINES = 100
"""Maximum answers that are not written yet. If the gateway is killed, these calls run again, like those in progress."""
UNANSWERED: dict[Status, tuple[str, str]] = {
    "expired": ("batch_expired", "the call did not run before the completion window ended")
}
"""Errors (code, message) that the error file states for calls that never ran, by the batch's final status. With other
statuses the file does not list these calls."""


CheckForm = Callable[[str, Endpoint, LineForm], Awaitable[BatchProblem | None]]
"""Function that returns what is wrong with a form of answers; None if nothing is. It gets the tenant, too."""


class LeaseLost(Exception):
    """Another gateway has claimed the batch, or the batch was removed."""


class BatchRun:
    """Run of one batch. `unix` returns Unix time (store clock).

    Async methods raise LeaseLost and StoreUnavailable. After StoreUnavailable they may be called again.
    """

    def __init__(
        self,
        claimed: Stored[BatchRecord],
        batches: BatchStore,
        files: FileStore,
        threads: LeavableThreads,
        unix: Callable[[], Awaitable[float]],
        check_form: CheckForm,
    ) -> None:
        self.record = record = claimed.record
        self.changed = asyncio.Event()
        self.calls: set[asyncio.Task[None]] = set()
        self.attempts: dict[int, int] = {}
        """Number of failed attempts of each call that is retried, by index of the call."""
        requested: Status | None = "cancelled" if record.status == "cancelling" else None
        self.ending: Status | None = record.ends_as or requested
        """Final status that the batch will get; None while further calls may start."""
        self.given_up = self.lost = False
        """True if the batch must be released (`given_up`), or if another gateway has it (`lost`)."""
        self.written_at = asyncio.get_running_loop().time()
        self._holder = record.holder
        self._problems = record.problems
        self._stored = claimed
        self._batches, self._files, self._threads, self._unix = batches, files, threads, unix
        self._check_form = check_form
        self._reader: LineReader | None = None
        self._scanned = LineScanner(record.endpoint)
        self._order: array[int] = array("l")
        self._next = 0
        self._again: list[tuple[float, int]] = []
        """Heap of queued retries: (earliest start by the event loop's clock, index of the call)."""
        self._done = bytearray(record.done)
        self._counts = {True: record.completed, False: record.failed}
        self._writers = {
            good: PartWriter(files, record.tenant, file_id, record.claim, parts)
            for good, file_id, parts in (
                (True, record.output_id, record.output),
                (False, record.error_id, record.errors),
            )
        }
        self._unwritten: list[tuple[PartWriter, str, bytes]] = []
        self._unwritten_answers = 0

    @property
    def key(self) -> tuple[str, str]:
        return self.record.tenant, self.record.id

    async def scan(self) -> None:
        """Reads the input, and validates it on the first run.

        Afterwards the batch is in progress or has failed. Raises NotFound if the file was deleted.
        """
        try:
            source = await self._threads.run(lambda: self._files.get(self.record.tenant, self.record.input_file))
        except CorruptRecord:
            self.end("failed", BatchProblem("input_file_damaged", "the input file is damaged: upload it again"))
            return
        scanner = LineScanner(self.record.endpoint)
        for start, length in piece_starts(source.bytes):
            await self._threads.run(partial(self._feed, scanner, source, start, length))
            await self._keep_lease()
            # If the batch is ending, the lines are needed only for the error file.
            if scanner.full or (self.ending is not None and self.ending not in UNANSWERED):
                break
        scanner.end()
        self._scanned = scanner
        self._reader = LineReader(scanner, partial(self._files.read, self.record.tenant, source), self._threads)
        problems = scanner.problems
        if not problems and self.record.status == "validating" and self.ending is None:
            problems = await self._problems_of_forms(scanner)
        if self.record.status != "validating" or self.ending is not None:
            self._order = scanner.order()
            return
        if problems:
            self.end("failed", *problems)
            return
        now, total = await self._unix(), len(scanner.starts)
        self._order, self._done = scanner.order(), bits_for(total)
        self.record = msgspec.structs.replace(self.record.with_status("in_progress", now), total=total)
        await self.write()

    async def _problems_of_forms(self, scanner: LineScanner) -> list[BatchProblem]:
        """Returns what is wrong with the forms of answers."""
        problems: list[BatchProblem] = []
        for form in scanner.forms.lines:
            check = asyncio.ensure_future(self._check_form(self.record.tenant, self.record.endpoint, form))
            try:
                while not check.done():
                    await asyncio.wait({check}, timeout=BEAT_SECONDS)
                    await self._keep_lease()
            finally:
                check.cancel()
            problem = check.result()
            problems += [] if problem is None else [problem]
            if self.ending is not None or len(problems) >= MAX_PROBLEMS:
                break
        return problems

    def next_call(self) -> int | None:
        """Returns the index of the next call to run; None if no call may start."""
        if not self._may_begin():
            return None
        if self._again and self._again[0][0] <= asyncio.get_running_loop().time():
            return heappop(self._again)[1]
        while self._next < len(self._order):
            index = self._order[self._next]
            self._next += 1
            if not self._is_done(index):
                return index
        return None

    @property
    def has_calls(self) -> bool:
        """True if `next_call` may return a call now. It still returns None if all remaining calls have been
        answered."""
        is_due = self._again and self._again[0][0] <= asyncio.get_running_loop().time()
        return self._may_begin() and bool(is_due or self._next < len(self._order))

    def _may_begin(self) -> bool:
        """Returns whether a call may start: not with FLUSH_LINES unwritten answers, which a crash would repeat."""
        leaving = self.ending is not None or self.given_up or self.lost
        return not leaving and self._unwritten_answers < FLUSH_LINES

    def line_number(self, index: int) -> int:
        return self._scanned.numbers[index]

    async def line(self, index: int) -> Line:
        """Returns the call's line. Raises NotFound if the file was deleted."""
        return await self._read_line(index, self._order[self._next : self._next + AHEAD_LINES])

    async def _read_line(self, index: int, ahead: Iterable[int]) -> Line:
        assert self._reader is not None
        return await self._reader.line(index, (call for call in ahead if not self._is_done(call)))

    def put_back(self, index: int, seconds: float) -> None:
        """Queues a call again, to start after `seconds` seconds."""
        heappush(self._again, (asyncio.get_running_loop().time() + seconds, index))

    def record_answer(self, index: int, custom_id: str, reply: LineReply) -> None:
        """Records a call's final answer."""
        self._add(index, reply.status == 200, reply_line(custom_id, reply))
        self.attempts.pop(index, None)

    def end(self, outcome: Status, *problems: BatchProblem) -> None:
        """Sets the final status. No further call starts, and `finish` completes the batch."""
        if self.ending is None:
            self.ending, self._problems = outcome, problems
        self.changed.set()

    @property
    def all_answered(self) -> bool:
        return self.record.total > 0 and sum(self._counts.values()) >= self.record.total

    async def write(self, **changes: Any) -> None:
        """Writes new answers, then the record, which renews the lease. `changes`: new values of further fields of the
        record."""
        self.changed.clear()
        for writer in self._writers.values():
            if (part := writer.take()) is not None:
                self._unwritten.append((writer, *part))
        written = self._unwritten_answers
        self.record = self._with_progress(self.record)
        while self._unwritten:
            writer, name, data = self._unwritten[0]
            await self._threads.run(partial(writer.write, name, data))
            del self._unwritten[0]
        while (stored := await self._threads.run(partial(self._write_record, changes))) is None:
            await self._merge()
        self.record, self._stored = stored.record, stored
        self.written_at = asyncio.get_running_loop().time()
        self._unwritten_answers -= written

    def _write_record(self, changes: dict[str, Any]) -> Stored[BatchRecord] | None:
        return self._batches.change(self._stored, msgspec.structs.replace(self.record, **changes))

    async def finish(self) -> None:
        """Completes the batch with its final status. Its files are stored before the record gets that status."""
        outcome = self.ending
        assert outcome is not None
        if outcome == "cancelled" and self.record.status != "cancelling":
            self.record = self.record.with_status("cancelling", await self._unix())
        elif outcome in ("completed", "expired") and self.record.status != "finalizing":
            self.record = self.record.with_status("finalizing", await self._unix())
        if outcome in UNANSWERED:
            with suppress(NotFound):  # without the input the calls' ids are unknown
                await self._record_unanswered(*UNANSWERED[outcome])
        await self.write()
        now = await self._unix()
        await self._threads.run(partial(self._make_files, now))
        ended = self.record.with_status(outcome, now)
        await self.write(status=ended.status, at=ended.at, holder="")

    def give_up(self) -> None:
        """Requests the release of the batch, so that another gateway, or this one later, can continue it."""
        self.given_up = True
        self.changed.set()

    async def release(self) -> None:
        """Ends the lease of a batch that has not ended, so that another gateway can continue at once."""
        if not self.lost and not self.record.ended:
            await self.write(holder="")

    async def _record_unanswered(self, code: str, message: str) -> None:
        count = len(self._scanned.starts)
        for index in range(count):
            if not self._is_done(index):
                line = await self._read_line(index, range(index + 1, min(index + AHEAD_LINES, count)))
                self._add(index, False, unanswered_line(line.custom_id, code, message))
                if self._unwritten_answers >= FLUSH_LINES:
                    await self.write()
                await self._keep_lease()

    async def _keep_lease(self) -> None:
        if asyncio.get_running_loop().time() - self.written_at > BEAT_SECONDS:
            await self.write()

    def _make_files(self, now: float) -> None:
        record = self.record
        for file_id, parts, kind in (
            (record.output_id, record.output, "output"),
            (record.error_id, record.errors, "errors"),
        ):
            if parts:
                file = FileRecord(file_id, f"{record.id}_{kind}.jsonl", "batch_output", now, parts)
                self._files.commit(record.tenant, file)

    async def _merge(self) -> None:
        """Merges a change of the record by another process, such as a request to cancel. Raises LeaseLost."""
        current = await self._threads.run(lambda: self._batches.find(*self.key))
        if current is None:  # its tenant was removed, maybe before the last answers were written
            await self._threads.run(self._remove_answers)
        if current is None or (current.record.holder, current.record.claim) != (self._holder, self.record.claim):
            raise LeaseLost
        theirs, self._stored = current.record, current
        if theirs.status == "cancelling" and self.record.status in ("validating", "in_progress"):
            self.record = msgspec.structs.replace(self.record, status="cancelling", at={**self.record.at, **theirs.at})
            self.end("cancelled")

    def _remove_answers(self) -> None:
        for file_id in (self.record.output_id, self.record.error_id):
            self._files.abandon(self.record.tenant, file_id)

    def _with_progress(self, record: BatchRecord) -> BatchRecord:
        return msgspec.structs.replace(
            record,
            completed=self._counts[True],
            failed=self._counts[False],
            done=bytes(self._done),
            output=self._writers[True].parts,
            errors=self._writers[False].parts,
            ends_as=self.ending,
            problems=self._problems,
        )

    def _add(self, index: int, good: bool, line: bytes) -> None:
        self._writers[good].add(line)
        self._done[index // 8] |= 1 << index % 8
        self._counts[good] += 1
        self._unwritten_answers += 1
        if self._unwritten_answers >= FLUSH_LINES or self.all_answered:
            self.changed.set()

    def _is_done(self, index: int) -> bool:
        return bool(self._done[index // 8] >> index % 8 & 1)

    def _feed(self, scanner: LineScanner, source: FileRecord, start: int, length: int) -> None:
        scanner.feed(self._files.read(self.record.tenant, source, start, length))
