"""A gate that is closed for a while."""

from __future__ import annotations

import asyncio

from cluster.redis_limits import Gate


def test_nobody_passes_while_it_is_closed() -> None:
    async def main() -> None:
        gate, said = Gate(), list[str]()
        inside, go_on = asyncio.Event(), asyncio.Event()

        async def first() -> None:
            async with gate.passing():
                inside.set()
                await go_on.wait()
                said.append("first")

        async def close() -> None:
            async with gate.closed():
                said.append("closed")
                await asyncio.sleep(0)
                said.append("opened")

        async def late() -> None:
            async with gate.passing():
                said.append("late")

        tasks = [asyncio.create_task(first())]
        await inside.wait()
        tasks.append(asyncio.create_task(close()))
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(late()))
        await asyncio.sleep(0)
        assert said == []
        go_on.set()
        await asyncio.gather(*tasks)
        assert said == ["first", "closed", "opened", "late"]

    asyncio.run(main())


def test_it_opens_again_whatever_happens() -> None:
    async def main() -> None:
        gate = Gate()
        async with gate.passing():
            closing = asyncio.create_task(_close(gate))
            await asyncio.sleep(0)
            closing.cancel()
            await asyncio.wait([closing])
        async with asyncio.timeout(10), gate.passing(), gate.passing():
            pass
        await _close(gate)

    async def _close(gate: Gate) -> None:
        async with gate.closed():
            pass

    asyncio.run(main())
