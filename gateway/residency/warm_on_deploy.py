"""Warms versions before a deploy or an alias sends them calls. Failures become warnings and do not stop the deploy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from gateway.http.routing import BOOLEAN, parameter
from gateway.residency.messages import WARM_SECONDS, Version, WarmOrder

if TYPE_CHECKING:
    from gateway.residency.warming import Warming

WARM = parameter(
    "query", "warm", f"First bring it to its node; what is not there after {WARM_SECONDS:g} s is a warning", BOOLEAN
)


async def warm_targets(warming: Warming, tenant: str, name: str, versions: Iterable[str]) -> list[str]:
    """Waits until each of these versions is warm on one node. Returns warnings about what failed.

    Raises NotFound for a version that does not exist, and the exceptions of Functions.target.
    """
    targets = [each for version in versions for each in await warming.versions(tenant, name, version)]
    return await _warmed(warming, WarmOrder(tenant, name, targets))


async def warm_staged(warming: Warming, tenant: str, name: str, staged: Version) -> list[str]:
    """Waits until a version that is stored, but not yet listed, is warm on a node. Returns warnings about what
    failed."""
    return await _warmed(warming, WarmOrder(tenant, name, [staged]))


async def _warmed(warming: Warming, order: WarmOrder) -> list[str]:
    problem = await warming.until_warm(order, WARM_SECONDS)
    return [] if problem is None else [f"takes calls without being warm: {problem}"]
