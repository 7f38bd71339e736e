"""Whether calls that meet an empty cluster are held, asked by several at once."""

from __future__ import annotations

import asyncio
import time

from cluster.leases import Lease, MemoryLeases
from cluster.state import MemoryClusterState
from gateway.calls.scale_from_zero import AUTOSCALER, UNLED_S, FirstNodeWait


class SlowLeases(MemoryLeases):
    """Tells whose a lease is when `go_on` is set, as another process would after a while."""

    def __init__(self) -> None:
        super().__init__(time.monotonic)
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.looks = 0

    async def get(self, name: str) -> Lease:
        self.looks += 1
        await self.go_on.wait()
        return await super().get(name)


class World:
    """No node, and an autoscaler that came just now, after a call had been told that there is none."""

    async def __aenter__(self) -> World:
        self.now, self.leases = 0.0, SlowLeases()
        self.hold = FirstNodeWait(MemoryClusterState(time.monotonic), self.leases, "base", 60.0, lambda: self.now)
        assert not await self.hold.should_wait()
        await self.leases.take(AUTOSCALER, "me", 60.0)
        self.now += UNLED_S
        self.leases.go_on.clear()
        self.leases.looks = 0
        return self

    async def __aexit__(self, *_: object) -> None:
        self.leases.go_on.set()

    async def asked(self, count: int) -> list[asyncio.Task[bool]]:
        """So many calls at once; the first of them is asking now."""
        calls = [asyncio.create_task(self.hold.should_wait()) for _ in range(count)]
        for _ in range(20):
            await asyncio.sleep(0)
        return calls


def test_calls_at_once_wait_for_one_answer() -> None:
    async def main() -> None:
        async with World() as world:
            calls = await world.asked(8)
            assert not [call for call in calls if call.done()], "nobody goes by the answer before"
            world.leases.go_on.set()
            assert await asyncio.gather(*calls) == [True] * 8
            assert world.leases.looks == 1

    asyncio.run(main())


def test_a_caller_that_leaves_takes_no_answer_from_others() -> None:
    async def main() -> None:
        async with World() as world:
            first, *others = await world.asked(4)
            first.cancel()
            await asyncio.wait([first])
            world.leases.go_on.set()
            assert await asyncio.gather(*others) == [True] * 3

    asyncio.run(main())
