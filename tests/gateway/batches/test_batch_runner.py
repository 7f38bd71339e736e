"""Claims, turns, takeovers and ends of batches, with scripted answers and a real store."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
from batch_world import World, failed, good, until

from adapters.errors import StoreUnavailable
from adapters.local_store import LocalStore
from adapters.tenant_removal import remove_below
from cluster.errors import ServiceError
from gateway.batches import files as files_module
from gateway.batches import line_reader
from gateway.batches import runner as runner_module
from gateway.batches.lines import Line
from gateway.batches.records import BatchRecord, BatchStore, bits_for
from gateway.batches.replies import Answer
from gateway.batches.run import FLUSH_LINES
from gateway.jobs.job_store import Stored


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(runner_module, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(runner_module, "FLUSH_SECONDS", 0.02)
    monkeypatch.setattr(runner_module, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(runner_module, "TICK_SECONDS", 0.001)
    return World(tmp_path / "registry")


def test_calls_of_a_model_come_together_whatever_the_file_s_order(world: World) -> None:
    models = [f"f{at % 7}" for at in range(70)]
    batch = world.submit("acme", models)
    world.room = 1.0

    async def run() -> BatchRecord:
        async with world.gateway("one", good):
            return await world.ended(batch)

    record = asyncio.run(run())
    output, errors = world.outcome(record)
    assert (record.status, record.completed, errors) == ("completed", 70, {})
    assert {name: line["response"]["body"]["said"] for name, line in output.items()} == {
        f"acme-{at}": f"acme-{at}" for at in range(70)
    }
    ran = [models[int(custom_id.rpartition("-")[2])] for _, custom_id in world.began]
    assert ran == sorted(models)


def test_a_dead_gateway_s_batch_goes_on_behind_what_it_has_written(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first hangs in its store after some writes, as one that was killed: its lease ends."""
    monkeypatch.setattr(runner_module, "LEASE_SECONDS", 0.4)
    batch = world.submit("acme", ["f"] * 300)
    dead = BatchStore(_Dying(world.store, writes=4))

    async def run() -> BatchRecord:
        async with AsyncExitStack() as stack:
            living, world.batches = world.batches, dead
            await stack.enter_async_context(world.gateway("first", good))
            world.batches = living
            await until(lambda: any(name == "first" for name, _ in world.began))
            await stack.enter_async_context(world.gateway("second", good))
            return await world.ended(batch)

    record = asyncio.run(run())
    output, _ = world.outcome(record)
    assert output.keys() == {f"acme-{at}" for at in range(300)}
    assert (record.completed, record.claim) == (300, 2)
    began = Counter(name for name, _ in world.began)
    repeated = began["first"] + began["second"] - 300
    assert began["second"] > 0
    assert 0 <= repeated <= FLUSH_LINES + world.room


class _Dying:
    """A store whose records can't be written any more after so many writes."""

    def __init__(self, store: LocalStore, writes: int) -> None:
        self._store, self._writes = store, writes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        self._writes -= 1
        if self._writes < 0:
            raise StoreUnavailable("cut off")
        return self._store.put_if_match(key, data, etag)


def test_a_stopped_gateway_s_batch_is_taken_at_once(world: World) -> None:
    """Its lease is given back: ten seconds are not over."""
    batch = world.submit("acme", ["f"] * 50)

    async def run() -> BatchRecord:
        hold = asyncio.Event()

        answered = list[str]()

        async def some(name: str, line: Line) -> Answer:
            if int(line.custom_id.rpartition("-")[2]) >= 20:
                await asyncio.Event().wait()
            answer = await good(name, line)
            answered.append(line.custom_id)
            if len(answered) == 20:
                asyncio.get_running_loop().call_later(0.5, hold.set)  # what has answered is booked
            return answer

        async with world.gateway("first", some):
            await hold.wait()
        left = world.read(batch)
        assert (left.status, left.holder, left.completed) == ("in_progress", "", 20)
        async with world.gateway("second", good):
            return await world.ended(batch)

    began = time.monotonic()
    record = asyncio.run(run())
    assert record.completed == 50
    assert sorted(name for name, line in world.began if int(line.rpartition("-")[2]) < 20) == ["first"] * 20
    assert time.monotonic() - began < runner_module.LEASE_SECONDS, "it did not wait for the lease"


def test_two_gateways_never_run_one_call_twice(world: World) -> None:
    batches = [world.submit(tenant, ["f", "g"] * 40) for tenant in ("a", "b", "c")]

    async def run() -> list[BatchRecord]:
        async with world.gateway("one", good), world.gateway("two", good):
            return [await world.ended(batch) for batch in batches]

    for record in asyncio.run(run()):
        assert (record.status, record.completed, record.claim) == ("completed", 80, 1)
    assert max(Counter(custom_id for _, custom_id in world.began).values()) == 1


def test_tenants_take_turns_by_weight(world: World) -> None:
    """Whatever the sizes of their batches: b's 30 calls don't wait for a's 300."""
    world.room = 1.0
    world.accounts.weights = {"a": 1.0, "b": 3.0}

    async def run() -> None:
        go = asyncio.Event()

        async def gated(name: str, line: Line) -> Answer:
            await go.wait()
            return await good(name, line)

        large = world.submit("a", ["f"] * 300)
        async with world.gateway("one", gated) as runner:
            await until(lambda: bool(world.began))
            small = world.submit("b", ["f"] * 60)
            runner.wake()
            await until(lambda: len(runner._runs) == 2 and runner._shares.weights.get("b") == 3.0)
            go.set()
            await world.ended(small)
            assert not world.read(large).ended

    asyncio.run(run())
    turns = [custom_id[0] for _, custom_id in world.began]
    end = len(turns) - turns[::-1].index("b")
    assert turns[:end].count("b") == 60
    assert 18 <= turns[:end].count("a") <= 24, "three to one, but for the calls before b came"


def test_a_tenant_with_several_batches_gives_one_back_for_a_tenant_with_none(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "MAX_RUNS", 2)
    world.room = 0.0
    first, second = world.submit("a", ["f"]), world.submit("a", ["f"])

    async def run() -> None:
        async with world.gateway("one", good) as runner:
            await until(lambda: len(runner._runs) == 2)
            other = world.submit("b", ["f"])
            await until(lambda: len(runner._runs) == 2 and ("b", other.id) in runner._runs)
            # the one whose run began last is given back, and either may have begun first
            (given_back,) = (each for each in (first, second) if ("a", each.id) not in runner._runs)
            await until(lambda: world.read(given_back).holder == "")

    asyncio.run(run())


def test_calls_that_were_refused_run_later_and_failing_ones_are_tried_again(world: World) -> None:
    batch = world.submit("acme", ["f"] * 12)
    tries: Counter[str] = Counter()

    async def fussy(name: str, line: Line) -> Answer:
        tries[line.custom_id] += 1
        number, tried = int(line.custom_id.rpartition("-")[2]), tries[line.custom_id]
        if number < 4 and tried < 3:
            return failed("rate_limited" if number % 2 else "unavailable", 429, 0.01)
        if number < 6 and tried < 5:
            return failed("overloaded", 429, 0.01) if number < 4 else failed("node_failed", 502)
        return failed("validation_failed", 400) if number == 7 else await good(name, line)

    async def run() -> BatchRecord:
        async with world.gateway("one", fussy):
            return await world.ended(batch)

    output, errors = world.outcome(asyncio.run(run()))
    assert errors.keys() == {"acme-4", "acme-5", "acme-7"}
    assert errors["acme-4"]["response"]["status_code"] == 502
    assert output.keys() == {f"acme-{number}" for number in (0, 1, 2, 3, 6, 8, 9, 10, 11)}
    assert [tries[f"acme-{number}"] for number in range(8)] == [5, 5, 5, 5, 3, 3, 1, 1]


@pytest.mark.parametrize("why", ["cancelled", "expired", "key_revoked", "input_deleted"])
def test_a_batch_that_ends_early_keeps_its_answers(world: World, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_reader, "MAX_CACHED_BYTES", 0)  # each line is read when its call begins
    batch = world.submit("acme", ["f"] * 30, key_id="k")

    async def run() -> BatchRecord:
        async def half(name: str, line: Line) -> Answer:
            if int(line.custom_id.rpartition("-")[2]) >= 10:
                await asyncio.Event().wait()
            return await good(name, line)

        async with world.gateway("one", half) as runner:
            await until(lambda: world.read(batch).completed == 10)
            if why == "cancelled":
                assert world.batches.cancel("acme", batch.id).status == "cancelling"
                assert world.batches.cancel("acme", batch.id).status in ("cancelling", "cancelled")
                runner.wake()
            elif why == "expired":
                world.unix = lambda: batch.expires
            elif why == "key_revoked":
                world.accounts.revoked.add("k")
            else:
                world.files.delete("acme", batch.input_file)
                world.room = 100.0  # the next calls are read from the file
            return await world.ended(batch)

    record = asyncio.run(run())
    output, errors = world.outcome(record)
    assert output.keys() == {f"acme-{number}" for number in range(10)}
    status = {"expired": "expired", "input_deleted": "failed"}.get(why, "cancelled")
    assert (record.status, record.total, record.completed) == (status, 30, 10)
    codes = [problem.code for problem in record.problems]
    assert codes == {"key_revoked": ["key_revoked"], "input_deleted": ["input_file_deleted"]}.get(why, [])
    late = {f"acme-{number}" for number in range(10, 30)} if why == "expired" else set()
    assert errors.keys() == late
    assert all(line["error"]["code"] == "batch_expired" and line["response"] is None for line in errors.values())
    with pytest.raises(ServiceError) if status != "cancelled" else nullcontext():
        world.batches.cancel("acme", batch.id)


def test_calls_that_have_not_run_are_all_named_also_after_a_takeover(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first gateway died when the batch had expired; its input is read in several pieces."""
    monkeypatch.setattr(files_module, "READ_BYTES", 1000)
    batch = world.submit("acme", ["f"] * 30)
    stored = world.batches.find("acme", batch.id)
    assert stored is not None
    expired = stored.record.with_status("finalizing", time.time())
    expired = msgspec.structs.replace(expired, ends_as="expired", total=30, done=bits_for(30), claim=1)
    assert world.batches.change(stored, expired) is not None

    async def run() -> BatchRecord:
        async with world.gateway("second", good):
            return await world.ended(batch)

    record = asyncio.run(run())
    _, errors = world.outcome(record)
    assert (record.status, record.failed, world.began) == ("expired", 30, [])
    assert errors.keys() == {f"acme-{number}" for number in range(30)}


def test_a_gateway_that_could_not_say_the_end_leaves_it_to_the_next_at_once(world: World) -> None:
    """It is stopped while its store takes no end: the batch is no one's then, and not ended."""
    batch, refused = world.submit("acme", ["f"] * 10), threading.Event()

    class Endless(BatchStore):
        def change(self, stored: Stored[BatchRecord], record: BatchRecord) -> Stored[BatchRecord] | None:
            if record.ended:
                refused.set()
                raise StoreUnavailable("it takes no end")
            return super().change(stored, record)

    async def run() -> BatchRecord:
        living, world.batches = world.batches, Endless(world.store)
        async with world.gateway("first", good):
            await until(refused.is_set)
        left = world.read(batch)
        assert (left.status, left.holder, left.completed) == ("finalizing", "", 10)
        world.batches = living
        async with world.gateway("second", good):
            return await world.ended(batch)

    record = asyncio.run(run())
    output, _ = world.outcome(record)
    assert (record.status, len(output), len(world.began)) == ("completed", 10, 10)


def test_a_batch_expires_also_without_its_input(world: World) -> None:
    batch = world.submit("acme", ["f"] * 10)
    world.room = 0.0

    async def run() -> BatchRecord:
        async with world.gateway("one", good):
            await until(lambda: world.read(batch).status == "in_progress")
            world.files.delete("acme", batch.input_file)
            world.unix = lambda: batch.expires
            return await world.ended(batch)

    record = asyncio.run(run())
    assert (record.status, record.claim) == ("expired", 1)


def test_a_batch_that_is_cancelled_before_it_is_claimed_runs_nothing(world: World) -> None:
    batch = world.submit("acme", ["f"] * 10)
    world.batches.cancel("acme", batch.id)

    async def run() -> BatchRecord:
        async with world.gateway("one", good):
            return await world.ended(batch)

    assert (asyncio.run(run()).status, world.began) == ("cancelled", [])


def test_a_record_that_can_not_be_read_holds_up_no_other(world: World) -> None:
    broken, batch = world.submit("acme", ["f"]), world.submit("acme", ["f"])
    world.store.put(f"data/acme/batches/{broken.id}.json", b"{")

    async def run() -> BatchRecord:
        async with world.gateway("one", good):
            return await world.ended(batch)

    assert asyncio.run(run()).status == "completed"


def test_a_batch_whose_input_s_record_is_damaged_fails(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "LEASE_SECONDS", 0.4)
    batch = world.submit("acme", ["f"])
    world.store.put(f"data/acme/files/{batch.input_file}.json", b"{")

    async def run() -> BatchRecord:
        async with world.gateway("one", good), asyncio.timeout(60):
            return await world.ended(batch)

    record = asyncio.run(run())
    assert (record.status, record.claim, world.began) == ("failed", 1, [])
    assert [(problem.code, problem.line) for problem in record.problems] == [("input_file_damaged", None)]


def test_a_batch_of_a_removed_tenant_ends_without_a_trace(world: World) -> None:
    """Nor is anything left of answers that come when its record is gone already."""
    batch = world.submit("acme", ["f"] * 10)

    async def run() -> None:
        removed = asyncio.Event()

        async def late(name: str, line: Line) -> Answer:
            if int(line.custom_id.rpartition("-")[2]) >= 3:
                await removed.wait()
            return await good(name, line)

        async with world.gateway("one", late) as runner:
            await until(lambda: world.read(batch).completed == 3)
            removed.set()
            remove_below(world.store, "data/acme/")
            await until(lambda: not runner._runs)

    asyncio.run(run())
    assert not world.store.list("data/")


def test_a_file_with_wrong_lines_runs_nothing(world: World) -> None:
    batch = world.submit("acme", ["f", 7, "f"])  # type: ignore[list-item]

    async def run() -> BatchRecord:
        async with world.gateway("one", good):
            return await world.ended(batch)

    record = asyncio.run(run())
    assert (record.status, record.total, world.began) == ("failed", 0, [])
    assert [(problem.line, problem.code) for problem in record.problems] == [(2, "invalid_body")]
    assert record.reply().output_file_id is None


def test_records_of_a_newer_release_are_read(world: World) -> None:
    batch = world.submit("acme", ["f"])
    stored = msgspec.json.decode(world.store.get(f"data/acme/batches/{batch.id}.json").data)
    world.store.put(f"data/acme/batches/{batch.id}.json", msgspec.json.encode({**stored, "newer": 1}))
    assert world.read(batch).input_file == batch.input_file
