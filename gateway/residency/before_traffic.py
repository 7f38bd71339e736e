"""Has versions warm before a deploy or an alias gives them calls. What can't be is said, and holds up nothing more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from cluster.messages import Adapter
from gateway.http.routing import BOOLEAN, parameter
from gateway.residency.messages import WARM_SECONDS, Version, WarmOrder

if TYPE_CHECKING:
    from adapters.deployment import Deployment
    from gateway.services import Services

WARM = parameter(
    "query", "warm", f"First bring it to its node; what is not there after {WARM_SECONDS:g} s is a warning", BOOLEAN
)
SLACK_SECONDS = 30.0
"""After which a deploy's thread gives up an event loop that does not answer: it has stopped."""


async def warm_targets(services: Services, tenant: str, name: str, versions: Iterable[str]) -> list[str]:
    """Waits until these versions are warm on a node each. Returns what went wrong. Raises NotFound for a version that
    there is not, and what Functions.target does."""
    found = [each for version in versions for each in await services.warming.versions(tenant, name, version)]
    return await _warmed(services, WarmOrder(tenant, name, found))


def warm_first(services: Services, tenant: str, problems: list[str]) -> Callable[[Deployment], None]:
    """Returns what Registry.deploy is to call in its thread before it lists a version; `problems` is added to."""
    from adapters.artifact import artifact_key  # with numpy, which clients that know of warm deploys need not load

    loop = asyncio.get_running_loop()

    def wait(made: Deployment) -> None:
        adapter = Adapter(made.digest, artifact_key(services.base.fingerprint, made.digest), made.bytes, made.ranks)
        order = WarmOrder(tenant, made.function, [Version(made.version or 0, adapter)])
        waiting = asyncio.run_coroutine_threadsafe(_warmed(services, order), loop)
        problems.extend(waiting.result(WARM_SECONDS + SLACK_SECONDS))

    return wait


async def _warmed(services: Services, order: WarmOrder) -> list[str]:
    problem = await services.warming.until_warm(order, WARM_SECONDS)
    return [] if problem is None else [f"takes calls without being warm: {problem}"]
