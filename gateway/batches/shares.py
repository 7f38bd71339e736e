"""Fair shares of tenants in the calls of running batches: by weight, and within each tenant's window."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gateway.batches.run import BatchRun

MAX_WINDOW = 256.0
"""Maximum size of a tenant's window: its batches' calls in progress in one gateway worker."""
PAUSE_SECONDS = 1.0
MAX_PAUSE_SECONDS = 30.0


class Share:
    """Share of one tenant. Its window is the maximum number of calls in progress. It halves when a limit of the tenant
    refuses a call, and grows with each answer."""

    def __init__(self, served: float) -> None:
        self.weight = 1.0
        self.served = served
        """Sum over the started calls of 1 / (the tenant's weight at that time). The tenant with the lowest sum starts
        the next call."""
        self.in_flight = 0
        self.window = MAX_WINDOW
        self.paused_until = 0.0

    def record_refusal(self, now: float, retry_after: float | None) -> float:
        """Halves the window after a call was refused. Returns the seconds for which no call of the tenant may start."""
        seconds = min(retry_after or PAUSE_SECONDS, MAX_PAUSE_SECONDS)
        self.window, self.paused_until = max(1.0, self.window / 2), now + seconds
        return seconds

    def grow(self) -> None:
        self.window = min(MAX_WINDOW, self.window + 1 / self.window)


class Shares:
    """Shares of the tenants with running batches. `clock` is monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._shares: dict[str, Share] = {}

    def of(self, tenant: str) -> Share:
        """Returns the tenant's share. A new share starts with the lowest `served` of the other tenants."""
        if tenant not in self._shares:
            self._shares[tenant] = Share(min((share.served for share in self._shares.values()), default=0.0))
        return self._shares[tenant]

    def keep(self, tenants: Iterable[str]) -> None:
        """Forgets the tenants that are not in `tenants` and have no call in progress."""
        running = set(tenants)
        self._shares = {name: share for name, share in self._shares.items() if name in running or share.in_flight}

    def pick(self, runs: Iterable[BatchRun]) -> BatchRun | None:
        """Returns the batch whose call starts next: the oldest batch of the tenant with the lowest `served`. Returns
        None if no call may start."""
        oldest: dict[str, BatchRun] = {}
        for run in runs:
            tenant, current = run.record.tenant, oldest.get(run.record.tenant)
            if self._may_begin(tenant) and run.has_calls and (current is None or run.record.id > current.record.id):
                oldest[tenant] = run  # ids count down
        return min(oldest.values(), key=lambda run: self.of(run.record.tenant).served, default=None)

    def begin_call(self, tenant: str) -> None:
        """Counts a call of the tenant that starts now."""
        share = self.of(tenant)
        share.in_flight += 1
        share.served += 1 / share.weight

    def end_call(self, tenant: str) -> None:
        """Counts a call of the tenant as ended, whatever its outcome."""
        self.of(tenant).in_flight -= 1

    def _may_begin(self, tenant: str) -> bool:
        share = self.of(tenant)
        return share.in_flight < int(share.window) and self._clock() >= share.paused_until
