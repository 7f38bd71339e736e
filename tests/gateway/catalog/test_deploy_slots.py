"""Shares of the places for deploys: whom they hold up, and whom not."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest

from cluster.errors import ServiceError
from gateway.catalog.deploy_slots import DeploySlots
from gateway.config import GatewayConfig


def slots(wait_seconds: float = 60.0) -> DeploySlots:
    limits = {"max_uploads": 5, "max_tenant_uploads": 3, "max_deploys": 3, "max_tenant_deploys": 2}
    paths = dict.fromkeys(("model_dir", "base_id", "registry", "secret_file", "tmp_dir"), "")
    return DeploySlots(GatewayConfig(**paths, **limits, deploy_wait=wait_seconds))


def test_uploads_are_bounded_per_tenant_and_in_all() -> None:
    made = slots()
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(made.deploy("a"))
        with pytest.raises(ServiceError, match="you have 3 deploys") as refused, made.deploy("a"):
            pass
        assert (refused.value.type, refused.value.retry_after) == ("overloaded", 2.0)
        for tenant in ("b", "c"):
            stack.enter_context(made.deploy(tenant))
        with pytest.raises(ServiceError, match="too many deploys at once"), made.deploy("d"):
            pass
    with made.deploy("d"):  # all are free again
        pass


def test_a_tenant_takes_only_its_share_of_the_stores() -> None:
    async def main() -> None:
        made, leave = slots(), asyncio.Event()
        inside: list[str] = []
        entered = asyncio.Condition()

        async def deploy(tenant: str) -> None:
            with made.deploy(tenant):
                async with made.store(tenant):
                    async with entered:
                        inside.append(tenant)
                        entered.notify_all()
                    await leave.wait()

        async with asyncio.TaskGroup() as group:
            for tenant in ("a", "a", "a", "b"):
                group.create_task(deploy(tenant))
            async with asyncio.timeout(60), entered:
                await entered.wait_for(lambda: "b" in inside)
            assert sorted(inside) == ["a", "a", "b"]
            leave.set()
        assert sorted(inside) == ["a", "a", "a", "b"]

    asyncio.run(main())


def test_the_wait_for_a_store_is_bounded_and_leaves_nothing_taken() -> None:
    async def main() -> None:
        made = slots(wait_seconds=0.01)
        with made.deploy("a"), made.deploy("a"), made.deploy("b"), made.deploy("b"):
            async with made.store("a"), made.store("a"):
                with pytest.raises(ServiceError, match="too many deploys at once"):
                    async with made.store("a"):
                        pass
                async with made.store("b"):
                    with pytest.raises(ServiceError, match="too many deploys at once"):
                        async with made.store("b"):  # its own share has a place, but all three are taken
                            pass
            async with made.store("b"), made.store("b"):
                pass

    asyncio.run(main())
