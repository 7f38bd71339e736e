"""Twelve adapters on two slots, with cancels: right tokens, no death, and nothing left."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest

from cluster.messages import Adapter
from node_agent.ipc import Evict, ListAdapters
from tests.support.draws import MANY
from tests.support.peft_reference import TIE, Greedy, PeftReference
from tests.vllm.vllm_process import VllmProcess

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
SECONDS = 120.0 if MANY else 20.0
THREADS, MAX_TOKENS = 7, 12
PROMPT = [5, 17, 301, 44, 9]


def agrees(tokens: list[int], expected: Greedy) -> bool:
    """Whether the tokens are PEFT's, up to the first near tie."""
    for token, right, gap in zip(tokens, expected.tokens, expected.gaps, strict=False):
        if gap < TIE:
            return True
        if token != right:
            return False
    return True


class Caller(threading.Thread):
    """Calls drawn adapters, and cancels some calls, until the time is over."""

    def __init__(self, vllm: VllmProcess, choices: list[tuple[Adapter | None, Greedy]], seed: int) -> None:
        super().__init__()
        self._vllm, self._choices, self._rng = vllm, choices, random.Random(seed)
        self._until = time.monotonic() + SECONDS
        self.ended = {"length": 0, "cancelled": 0}
        self.wrong: list[object] = []

    def run(self) -> None:
        try:
            while time.monotonic() < self._until:
                self._call()
        except Exception as error:
            self.wrong.append(error)

    def _call(self) -> None:
        rng, vllm = self._rng, self._vllm
        adapter, expected = rng.choice(self._choices)
        request = vllm.submit(PROMPT, rng.randint(1, MAX_TOKENS), adapter)
        how = rng.choice(["none", "none", "at once", "admitted", "first token"])
        outcome = vllm.outcomes[request]
        if how == "admitted":
            vllm.wait(lambda: outcome.admitted or outcome.finished)
        elif how == "first token":
            vllm.wait(lambda: outcome.tokens or outcome.finished)
        if how != "none":
            vllm.cancel(request)
        finished = vllm.finish(request).finished
        assert finished is not None
        if finished.reason not in self.ended or not agrees(outcome.tokens, expected):
            self.wrong.append((finished, outcome.tokens, expected))
        self.ended[finished.reason] = self.ended.get(finished.reason, 0) + 1


def resources(vllm: VllmProcess) -> tuple[list[int], set[Path]]:
    """Returns the processes, and the shared memory, sockets and folders that there are now."""
    vllm.record_parts()
    return vllm.tree, vllm.shared_memory | vllm.sockets | vllm.folders


def test_races_for_slots_leave_nothing(
    vllm: VllmProcess, deployed: list[tuple[Path, Adapter]], peft: PeftReference
) -> None:
    before = resources(vllm)
    choices: list[tuple[Adapter | None, Greedy]] = [(None, peft.greedy(None, PROMPT, MAX_TOKENS))]
    choices += [(adapter, peft.greedy(directory, PROMPT, MAX_TOKENS)) for directory, adapter in deployed]
    callers = [Caller(vllm, choices, seed) for seed in range(THREADS)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(SECONDS + 300)
    assert not [wrong for caller in callers for wrong in caller.wrong]
    assert sum(caller.ended["length"] for caller in callers) > 10
    assert sum(caller.ended["cancelled"] for caller in callers) > 10
    vllm.wait_for_checks(1)
    stats = vllm.wait_until_idle()
    assert vllm.ready is not None and stats.kv_blocks_free == vllm.ready.kv_blocks
    assert stats.adapter_bytes_free == vllm.ready.adapter_bytes and not stats.loading_bytes
    vllm.send(ListAdapters("list"))
    vllm.wait(lambda: "list" in vllm.answers)
    found = vllm.answers["list"].found
    assert found is not None and not any(state.in_use or state.waiting for state in found.adapters)
    for state in found.adapters:
        vllm.send(Evict(state.digest, state.digest))
    vllm.wait(lambda: all(state.digest in vllm.answers for state in found.adapters))
    vllm.wait(lambda: not list(vllm.adapters_folder.iterdir()))
    assert resources(vllm) == before
    assert not vllm.errors()
    assert vllm.process.poll() is None
