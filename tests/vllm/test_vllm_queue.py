"""The queue in front of the real vLLM: fair shares of tenants, ends by callers, and deadlines."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cluster.fair_shares import token_cost
from cluster.messages import Adapter
from tests.support.peft_reference import PeftReference
from tests.vllm.test_vllm_races import agrees
from tests.vllm.vllm_process import VllmProcess, core_and_worker

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]
PROMPT = [5, 17, 301, 44]
TOKENS, LONG = 6, 400
ROWS = 8
"""`max_num_seqs` of the process that tests share"""
WEIGHTS = {"heavy": 3.0, "light": 1.0}

Deployed = list[tuple[Path, Adapter]]


@contextmanager
def standing_still(vllm: VllmProcess) -> Iterator[None]:
    """vLLM's worker computes nothing meanwhile."""
    _, worker = core_and_worker(vllm)
    os.kill(worker, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(worker, signal.SIGCONT)


def cancel_all(vllm: VllmProcess, requests: list[str]) -> None:
    for request in requests:
        vllm.cancel(request)
    assert {vllm.finish(request).finished.reason for request in requests} <= {"cancelled", "length"}  # type: ignore[union-attr]


def test_two_tenants_share_the_rows_by_weight(vllm: VllmProcess, deployed: Deployed) -> None:
    """Each has more requests than rows, and an adapter; what each gets follows its weight within few requests."""
    adapters = {tenant: adapter for tenant, (_, adapter) in zip(WEIGHTS, deployed, strict=False)}
    with standing_still(vllm):
        owners = {
            vllm.submit(PROMPT, TOKENS, adapters[tenant], tenant=tenant, weight=weight, function="f"): tenant
            for _ in range(100)
            for tenant, weight in WEIGHTS.items()
        }

    def served() -> Counter[str]:
        sums: Counter[str] = Counter()
        for request, tenant in owners.items():
            outcome = vllm.outcomes[request]
            if outcome.admitted:
                rank = max(adapters[tenant].ranks)
                sums[tenant] += token_cost(len(PROMPT), len(outcome.tokens), rank)  # type: ignore[assignment]
        return sums

    each = max(token_cost(len(PROMPT), TOKENS, max(adapter.ranks)) for adapter in adapters.values())
    vllm.wait(lambda: sum(served().values()) > 110 * each)
    per_weight = {tenant: served()[tenant] / weight for tenant, weight in WEIGHTS.items()}
    assert max(per_weight.values()) - min(per_weight.values()) <= 2 * ROWS * each, per_weight
    waiting = {tenant for request, tenant in owners.items() if not vllm.outcomes[request].admitted}
    assert waiting == set(WEIGHTS), "each tenant had requests in the queue"
    cancel_all(vllm, list(owners))


def test_a_tenant_does_not_wait_for_anothers_flood(vllm: VllmProcess, deployed: Deployed) -> None:
    """The flood calls more adapters than there are slots; the other tenant calls one that is in none of them."""
    with standing_still(vllm):
        flood = [
            vllm.submit(PROMPT, TOKENS, deployed[at % 6][1], tenant="flood", function=str(at % 6)) for at in range(120)
        ]

    def ended() -> int:
        return sum(vllm.outcomes[request].finished is not None for request in flood)

    vllm.wait(lambda: ended() >= 10)
    late, before = vllm.submit(PROMPT, TOKENS, deployed[7][1], tenant="late"), ended()
    vllm.wait(lambda: vllm.outcomes[late].tokens)
    assert ended() - before <= 3 * ROWS
    cancel_all(vllm, [*flood, late])


def test_callers_that_go_away_free_what_they_held(vllm: VllmProcess, deployed: Deployed, peft: PeftReference) -> None:
    """In the queue, while the adapter loads, before the first token, and in the midst of the answer; others get their
    whole answers."""
    expected = peft.greedy(deployed[0][0], PROMPT, 60)
    stays = vllm.submit(PROMPT, 60, deployed[0][1])
    vllm.wait(lambda: len(vllm.outcomes[stays].tokens) > 2)
    decoding = vllm.submit(PROMPT, LONG, deployed[0][1])
    vllm.wait(lambda: len(vllm.outcomes[decoding].tokens) > 2)
    with standing_still(vllm):
        loading = vllm.submit(PROMPT, LONG, deployed[8][1])
        prefilling = vllm.submit(PROMPT, LONG)
        vllm.wait(lambda: vllm.outcomes[loading].admitted and vllm.outcomes[prefilling].admitted)
        queued = vllm.submit(PROMPT, LONG, deployed[9][1])
        gone = [queued, loading, prefilling, decoding]
        for request in gone:
            vllm.cancel(request)
        vllm.wait(lambda: all(vllm.outcomes[request].finished for request in gone))
    counts = [len(vllm.outcomes[request].tokens) for request in gone]
    outcome = vllm.finish(stays)
    assert outcome.finished is not None and outcome.finished.reason == "length"
    assert len(outcome.tokens) == 60 and agrees(outcome.tokens, expected)
    for request, count in zip(gone, counts, strict=True):
        finished = vllm.outcomes[request].finished
        assert finished is not None and finished.reason == "cancelled"
        assert len(vllm.outcomes[request].tokens) == count, "nothing follows the end"
    assert_nothing_held(vllm)


def assert_nothing_held(vllm: VllmProcess) -> None:
    stats = vllm.wait_until_idle()
    assert vllm.ready is not None
    assert stats.kv_blocks_free == vllm.ready.kv_blocks
    assert stats.adapter_bytes_free == vllm.ready.adapter_bytes
    assert vllm.process.poll() is None and not vllm.errors()


def test_deadlines_end_requests_wherever_they_are(vllm: VllmProcess, deployed: Deployed) -> None:
    decoding = vllm.submit(PROMPT, LONG, deployed[0][1], timeout=3.0)
    vllm.wait(lambda: vllm.outcomes[decoding].tokens)
    with standing_still(vllm):
        rows = [vllm.submit(PROMPT, LONG, timeout=1.0) for _ in range(ROWS - 1)]
        vllm.wait(lambda: all(vllm.outcomes[request].admitted for request in rows))
        queued = vllm.submit(PROMPT, LONG, timeout=0.5)
        for request, kind in [(queued, "unavailable"), *((request, "timeout") for request in rows)]:
            finished = vllm.finish(request).finished
            assert finished is not None and (finished.reason, finished.error_type) == ("error", kind)
            assert not vllm.outcomes[request].tokens
        finished = vllm.finish(decoding).finished
        assert finished is not None and finished.reason == "timeout"
    assert_nothing_held(vllm)
    after = vllm.finish(vllm.submit(PROMPT, 4, deployed[0][1]))
    assert len(after.tokens) == 4
