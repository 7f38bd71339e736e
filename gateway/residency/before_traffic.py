"""Has versions warm before a deploy or an alias gives them calls. What can't be is said, and holds up nothing more."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from adapters.functions import ITEM_BYTES
from cluster.messages import Adapter
from gateway.http.routing import BOOLEAN, parameter
from gateway.residency.messages import WARM_SECONDS, Version, WarmOrder

if TYPE_CHECKING:
    from adapters.deployment import Deployment
    from gateway.services import Services

WARM = parameter(
    "query", "warm", f"First bring it to its node; what is not there after {WARM_SECONDS:g} s is a warning", BOOLEAN
)


async def warm_targets(services: Services, tenant: str, name: str, versions: Iterable[str]) -> list[str]:
    """Waits until these versions are warm on a node each. Returns what went wrong. Raises NotFound for a version that
    there is not, and what Functions.target does."""
    found = [each for version in versions for each in await services.warming.versions(tenant, name, version)]
    return await _warmed(services, WarmOrder(tenant, name, found))


async def warm_staged(services: Services, tenant: str, made: Deployment) -> list[str]:
    """Waits until a version that is stored, and not listed yet, is warm on a node. Returns what went wrong."""
    from adapters.artifact import artifact_key  # with numpy, which clients that know of warm deploys need not load

    key, itemsize = artifact_key(services.base.fingerprint, made.digest), ITEM_BYTES[made.dtype]
    adapter = Adapter(made.digest, key, made.bytes, made.ranks, itemsize)
    return await _warmed(services, WarmOrder(tenant, made.function, [Version(made.version or 0, adapter)]))


async def _warmed(services: Services, order: WarmOrder) -> list[str]:
    problem = await services.warming.until_warm(order, WARM_SECONDS)
    return [] if problem is None else [f"takes calls without being warm: {problem}"]
