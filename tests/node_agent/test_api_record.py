"""What a node's record says of its batch, its queue and its performance, at every moment between two pictures of the
engine."""

from __future__ import annotations

from pathlib import Path

import msgspec

from cluster.messages import Adapter
from cluster.news import NodeRecord, StrictRoom
from cluster.performance_model import DecodeModel, ModelKey, PerformanceModel, PrefillModel, Transfer
from tests.node_agent.scripted_engine import READY, admitted, finished, stats
from tests.node_agent.served_node import request_of, run_scenario, served_node

ADAPTER = Adapter("d" * 64, "artifacts/v1/base/digest", 1000, (4, 8))
MODEL = PerformanceModel(
    ModelKey("here", "fingerprint", "float32", "cpu", "0"),
    DecodeModel(0.1, 0.01, 0.001, 0.0, "adapter_ranks"),
    PrefillModel(0.1, 0.01, 0.0, 0.0),
    Transfer(0.0, 1e9),
    Transfer(0.0, 1e8),
)


def ranks(record: NodeRecord) -> tuple[int, int, int]:
    return record.max_rank, record.request_ranks, record.adapter_ranks


def test_a_request_counts_once_from_its_receipt_to_its_end(tmp_path: Path, stories_dir: Path) -> None:
    """In the queue until the engine's picture has it in the batch, with the rank of its adapter all the while."""

    async def scenario() -> None:
        async with served_node(tmp_path, stories_dir) as node:
            engine = await node.engine()
            idle = await node.record()
            assert (idle.max_rows, ranks(idle), idle.prompt_tokens_left) == (READY.max_rows, (0, 0, 0), 0)
            with_adapter = request_of("a", token_ids=[1, 2, 3], adapter=ADAPTER)
            async with node.generate(with_adapter) as first, node.generate(request_of("b")) as second:
                await engine.hear_submit()
                await engine.hear_submit()
                record = await node.record()
                assert (record.queued, record.running) == (2, 0)
                assert (ranks(record), record.prompt_tokens_left) == ((8, 8, 8), 4)

                await engine.say(admitted("a"))
                await first.next()
                record = await node.record()
                assert (record.queued, record.running, record.contexts) == (1, 1, 0)
                assert (ranks(record), record.prompt_tokens_left) == ((8, 8, 8), 4)

                batch = {"batch_ranks": [8], "batch_contexts": [2], "batch_slots": [5]}
                told = stats(
                    running=1, queued=1, prompt_tokens_left=1, loading_bytes=7, performance=MODEL, forecast_ratio=1.25,
                    **batch,
                )  # fmt: skip
                await engine.say(told)
                record = await node.record_where(lambda record: record.contexts == 2)
                assert (ranks(record), record.prompt_tokens_left, record.loading_bytes) == ((8, 8, 8), 2, 7)
                assert (record.performance, record.forecast_ratio) == (MODEL, 1.25)

                await engine.say(finished("a"), finished("b"), stats())
                await first.rest()
                await second.rest()
            record = await node.record_where(lambda record: not record.contexts)
            assert (ranks(record), record.prompt_tokens_left) == ((0, 0, 0), 0)

    run_scenario(scenario())


def test_an_adapter_of_several_rows_counts_once(tmp_path: Path, stories_dir: Path) -> None:
    """The base alone has no adapter that rows could share."""

    async def scenario() -> None:
        async with served_node(tmp_path, stories_dir) as node:
            engine = await node.engine()
            batch = {
                "batch_ranks": [8, 8, 16, 0, 0],
                "batch_contexts": [2, 3, 4, 5, 6],
                "batch_slots": [5, 5, 1, -1, -1],
            }
            await engine.say(stats(running=5, **batch))
            record = await node.record_where(lambda record: record.contexts == 20)
            assert ranks(record) == (16, 32, 24)

    run_scenario(scenario())


def test_nothing_is_known_of_an_engine_that_is_gone(tmp_path: Path, stories_dir: Path) -> None:
    async def scenario() -> None:
        async with served_node(tmp_path, stories_dir) as node:
            engine = await node.engine()
            await engine.say(stats(batch_ranks=[8], batch_contexts=[2], batch_slots=[5], performance=MODEL))
            await node.record_where(lambda record: record.performance == MODEL)
            await engine.close()
            record = await node.record_where(lambda record: record.state == "warming")
            assert (record.performance, record.max_rows, ranks(record)) == (None, 0, (0, 0, 0))

    run_scenario(scenario())


def test_cpu_workers_that_start_or_end_while_the_engine_runs_are_in_the_record(
    tmp_path: Path, stories_dir: Path
) -> None:
    """In what the gateway is sent of changes, too; requests in flight go on."""

    async def scenario() -> None:
        async with served_node(tmp_path, stories_dir) as node:
            engine = await node.engine()
            before = await node.record_where(lambda record: record.state == "ready")
            assert (before.cpu_workers, before.cpu_workers_reason, before.cpu_workers_ms) == (0, "", {})
            async with node.generate(request_of("a")) as stream:
                await engine.hear_submit()
                figures = {"warm": 8.5, "first_token_assist": 11.25}
                changed = {"cpu_workers": 2, "cpu_workers_reason": "they gain", "cpu_workers_ms": figures}
                await engine.say(msgspec.structs.replace(READY, **changed))
                record = await node.gateway.record_where(lambda record: record.cpu_workers == 2)
                assert (record.cpu_workers_reason, record.cpu_workers_ms) == ("they gain", figures)
                assert (record.state, record.queued) == ("ready", 1)
                await engine.say(admitted("a"), finished("a"), READY)
                await stream.rest()
            record = await node.gateway.record_where(lambda record: record.cpu_workers == 0)
            assert (record.cpu_workers_reason, record.cpu_workers_ms) == ("", {})

    run_scenario(scenario())


def test_what_strict_requests_find_counts_those_that_the_engine_has_not_told_of(
    tmp_path: Path, stories_dir: Path
) -> None:
    async def scenario() -> None:
        async with served_node(tmp_path, stories_dir) as node:
            engine = await node.engine()
            assert (await node.record()).strict is None, "an engine that does not tell"
            await engine.say(stats(strict=StrictRoom(rows=3, blocks=20, prompt_tokens=5)))
            record = await node.record_where(lambda record: record.strict is not None)
            assert record.strict == StrictRoom(rows=3, blocks=20, queued=0, prompt_tokens=5)
            call = request_of("a", token_ids=[1, 2, 3], slo_class="strict")
            async with node.generate(call) as first, node.generate(request_of("b")) as second:
                await engine.hear_submit()
                await engine.hear_submit()
                assert (await node.record()).strict == StrictRoom(rows=3, blocks=20, queued=1, prompt_tokens=8)
                await engine.say(admitted("a"))
                await first.next()
                assert (await node.record()).strict == StrictRoom(rows=3, blocks=20, queued=0, prompt_tokens=8)
                await engine.say(stats(strict=StrictRoom(rows=2, blocks=19, prompt_tokens=3)))
                record = await node.record_where(lambda record: record.strict.rows == 2)
                assert record.strict == StrictRoom(rows=2, blocks=19, queued=0, prompt_tokens=3)
                await engine.say(finished("a"), finished("b"), stats())
                await first.rest()
                await second.rest()

    run_scenario(scenario())


def test_a_record_counts_requests_of_best_effort_from_receipt_to_end(tmp_path: Path, stories_dir: Path) -> None:
    """Also while the engine computes their cold pass, in which their places can't be taken."""

    async def scenario() -> None:
        async with served_node(tmp_path, stories_dir) as node:
            engine = await node.engine()
            call = request_of("a", token_ids=[1, 2, 3], slo_class="best_effort")
            async with node.generate(call) as first, node.generate(request_of("b")) as second:
                await engine.hear_submit()
                await engine.hear_submit()
                assert (await node.record()).best_effort == 1
                await engine.say(admitted("a"), stats(batch_ranks=[8], batch_contexts=[2], batch_slots=[5]))
                await first.next()
                record = await node.record_where(lambda record: record.contexts == 2)
                assert record.best_effort == 1
                await engine.say(finished("a"), stats())
                await first.rest()
                assert (await node.record_where(lambda record: record.contexts == 0)).best_effort == 0
                await engine.say(finished("b"), stats())
                await second.rest()

    run_scenario(scenario())
