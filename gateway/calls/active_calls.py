"""The generations in progress in this process, which a forced delete can end."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager

from cluster.errors import ServiceError

Owner = tuple[str, str]
MAX_REVOCATIONS = 10_000
"""Maximum revocations kept for calls that have not arrived here yet; the oldest is forgotten."""

MAX_RECEIVED_IDS = 1_000
"""Maximum ids of revocations kept, so that each revocation counts once."""


class ActiveCalls:
    def __init__(self) -> None:
        self._revoked: dict[Owner, set[asyncio.Future[Exception]]] = {}
        self._received_ids: deque[str] = deque(maxlen=MAX_RECEIVED_IDS)
        self._revocations: OrderedDict[Owner, tuple[float, ServiceError]] = OrderedDict()

    @contextmanager
    def track(self, tenant: str, function: str, received: float) -> Iterator[asyncio.Future[Exception]]:
        """Registers a generation. Yields a future whose result is the reason why the generation must end early.

        Raises the reason at once if the function was revoked after the call was `received` (monotonic seconds).
        """
        owner = (tenant, function)
        since, reason = self._revocations.get(owner, (received, None))
        if reason is not None and received <= since:
            raise reason
        revoked: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self._revoked.setdefault(owner, set()).add(revoked)
        try:
            yield revoked
        finally:
            futures = self._revoked[owner]
            futures.discard(revoked)
            if not futures:
                del self._revoked[owner]

    def cancel(self, tenant: str, function: str, reason: ServiceError, id: str) -> None:
        """Ends the function's generations, and any call received before now that arrives here later.

        `id`: id of the revocation, which counts once however often it is received. So a repeated message does not end
        calls of a function that was deployed again.
        """
        if id in self._received_ids:
            return
        self._received_ids.append(id)
        self._revocations[tenant, function] = (time.monotonic(), reason)
        self._revocations.move_to_end((tenant, function))
        if len(self._revocations) > MAX_REVOCATIONS:
            self._revocations.popitem(last=False)
        for future in self._revoked.get((tenant, function), ()):
            if not future.done():
                future.set_result(reason)
