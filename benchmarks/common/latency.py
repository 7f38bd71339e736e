"""Times of requests as a client measures them, and the figures made of them, defined alike for every server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

PERCENTILES = (50, 90, 99)


@dataclass
class Sample:
    """A request. Times are seconds of one monotonic clock; `error` names why it failed, and is empty if it did not.

    `times` are the arrivals of its tokens. Where a server sends several tokens in one event they arrive together, so
    there can be fewer times than `output_tokens`, which is what the server says it generated.
    """

    model: str
    scheduled_at: float | None = None
    """time at which an open loop had to send it"""
    sent: float = 0.0
    times: list[float] = field(default_factory=list)
    end: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str = ""
    cold_start: str = ""
    """where the adapter was, if the server says so: none (on the device), host, disk or absent"""

    @property
    def ttft(self) -> float:
        """Request sent to first token received."""
        return self.times[0] - self.sent

    @property
    def e2e(self) -> float:
        """Request sent to end of the reply."""
        return self.end - self.sent

    @property
    def tpt(self) -> float:
        """E2E / output tokens: prefill and queue are part of it."""
        return self.e2e / self.output_tokens

    @property
    def tpot(self) -> float | None:
        """(E2E - TTFT) / (n - 1); None for a single token."""
        return (self.e2e - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def late(self) -> float | None:
        """Seconds by which an open loop sent it too late; None in a closed loop."""
        return None if self.scheduled_at is None else self.sent - self.scheduled_at


def summary(samples: Sequence[Sample]) -> dict[str, float]:
    """Counts, rates and percentiles in ms. Errors are counted by kind; latencies are those of the others.

    Rates are per second from the first request sent to the last reply ended, failed ones included in the time and not
    in the work. A latency without a single value is left out.
    """
    good = [sample for sample in samples if not sample.error]
    errors = Counter(sample.error for sample in samples if sample.error)
    figures: dict[str, float] = {"requests": len(samples), "ok": len(good), "errors": len(samples) - len(good)}
    figures |= {f"error_{kind}": count for kind, count in sorted(errors.items())}
    if samples:
        seconds = max(sample.end for sample in samples) - min(sample.sent for sample in samples)
        tokens = sum(sample.output_tokens for sample in good)
        figures |= {"seconds": seconds, "requests_s": len(good) / seconds, "tok_s": tokens / seconds}
        figures |= {"prompt_tokens": sum(sample.prompt_tokens for sample in good), "output_tokens": tokens}
    figures |= percentiles("ttft", [sample.ttft for sample in good])
    figures |= percentiles("tpot", [sample.tpot for sample in good if sample.tpot is not None])
    figures |= percentiles("tpt", [sample.tpt for sample in good])
    figures |= percentiles("e2e", [sample.e2e for sample in good])
    figures |= percentiles("gap", [after - before for sample in good for before, after in pairwise(sample.times)])
    late = [sample.late for sample in samples if sample.late is not None]
    if late:
        figures |= percentiles("late", late) | {"late_max_ms": max(late) * 1e3}
    return figures


def percentiles(name: str, seconds: Iterable[float], shares: Sequence[int] = PERCENTILES) -> dict[str, float]:
    """`{name}_p50_ms` and so on, interpolated linearly between the two nearest values; nothing of nothing."""
    values = list(seconds)
    if not values:
        return {}
    return {
        f"{name}_p{share}_ms": float(value) * 1e3
        for share, value in zip(shares, np.percentile(values, shares), strict=True)
    }
