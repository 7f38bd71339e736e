"""Places that batches and asynchronous calls leave to calls that somebody waits for."""

from __future__ import annotations

import asyncio

import pytest

from adapters.tenants import Limits, Tenant
from cluster.errors import ServiceError
from cluster.limits import MemoryLimits
from cluster.messages import GenerateRequest, Sampling
from gateway.calls.admission import call_of


def requests(count: int) -> list[GenerateRequest]:
    return [GenerateRequest("r", "b", "acme", [1], 1, Sampling(), 1.0)] * count


@pytest.mark.parametrize(("limit", "background"), [(1, 1), (2, 1), (8, 7), (9, 7), (64, 56), (None, 100)])
@pytest.mark.parametrize("whose", ["tenant", "function"])
def test_an_eighth_is_left(limit: int | None, background: int, whose: str) -> None:
    account = Tenant("acme", limits=Limits(concurrent=limit if whose == "tenant" else None))
    most = limit if whose == "function" else None

    async def taken(limits: MemoryLimits, yields: bool) -> int:
        count = 0
        while count < 100 and await limits.take(call_of(account, "f", most, requests(1), yields=yields)) is None:
            count += 1
        return count

    async def work() -> tuple[int, int]:
        limits = MemoryLimits(lambda: 0.0)
        return await taken(limits, True), await taken(limits, False)

    first, then = asyncio.run(work())
    assert first == background
    assert then == (100 if limit is None else limit - background)


def test_a_call_of_many_choices_may_run_at_all() -> None:
    account = Tenant("acme", limits=Limits(concurrent=8))
    limits = MemoryLimits(lambda: 0.0)
    assert asyncio.run(limits.take(call_of(account, "f", None, requests(8), yields=True))) is None
    with pytest.raises(ServiceError):
        call_of(account, "f", None, requests(9), yields=True)
