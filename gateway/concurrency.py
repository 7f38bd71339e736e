"""The limit `concurrent` of a tenant: choices that this gateway has under way for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cluster.errors import ServiceError

RETRY_AFTER = 1.0


class TenantPlaces:
    """Each gateway process counts for itself. A limit of None is none."""

    def __init__(self) -> None:
        self._taken: dict[str, int] = {}

    def check(self, tenant: str, choices: int, limit: int | None) -> None:
        """Before the first of `choices` is begun. Raises ServiceError as `place`, and `validation_failed` for more
        choices in one call than the limit will ever allow."""
        if limit is not None and choices > limit:
            raise ServiceError(
                "validation_failed", f"the call has {choices} choices, and the tenant may have {limit} at once"
            )
        self._refuse_over(tenant, choices, limit)

    @contextmanager
    def place(self, tenant: str, limit: int | None) -> Iterator[None]:
        """From the start of one choice to its end. Raises ServiceError `rate_limited` when all are taken."""
        self._refuse_over(tenant, 1, limit)
        self._taken[tenant] = self._taken.get(tenant, 0) + 1
        try:
            yield
        finally:
            self._taken[tenant] -= 1
            if not self._taken[tenant]:
                del self._taken[tenant]

    def _refuse_over(self, tenant: str, choices: int, limit: int | None) -> None:
        if limit is not None and self._taken.get(tenant, 0) + choices > limit:
            why = f"the tenant may have {limit} generations under way at once; try again later"
            raise ServiceError("rate_limited", why, retry_after=RETRY_AFTER)
