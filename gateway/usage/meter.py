"""Meters the usage of one call: the sum over all its choices."""

from __future__ import annotations

from collections.abc import Callable

from gateway.usage.counts import UsageCounts

Count = Callable[[UsageCounts], None]


class Meter:
    """Meter of one call. It reports once all `choices` have ended, before the end of the reply is sent.

    A failed call counts nothing. A call that its caller or the gateway's stop cut short counts what was computed until
    then.
    """

    def __init__(self, choices: int, count: Count) -> None:
        self._open_choices = choices
        self._count = count
        self._sums = UsageCounts(requests=1)
        self._failed = False
        self._cut = False
        self._cold = False

    def done(self, prompt_tokens: int, completion_tokens: int, cold_start: bool, device_seconds: float = 0.0) -> None:
        """Records a completed choice. `prompt_tokens` is 0 except for the first choice of a prompt."""
        self._add(prompt_tokens, completion_tokens, cold_start)
        self._sums.device_seconds += device_seconds
        self._open_choices -= 1
        if self._open_choices == 0 or self._cut:
            self._report()

    def cut(self, prompt_tokens: int, completion_tokens: int, cold_start: bool) -> None:
        """Records a choice that ended early. The tokens are those that the node has computed."""
        self._cut = True
        self._add(prompt_tokens, completion_tokens, cold_start)
        if self._sums.prompt_tokens or self._sums.completion_tokens:
            self._report()

    def fail(self) -> None:
        self._failed = True

    def _add(self, prompt_tokens: int, completion_tokens: int, cold_start: bool) -> None:
        self._sums.prompt_tokens += prompt_tokens
        self._sums.completion_tokens += completion_tokens
        # Choices of a call share its adapter, so they count as one cold start.
        self._sums.cold_starts += cold_start and not self._cold
        self._cold = self._cold or cold_start

    def _report(self) -> None:
        if not self._failed:
            counts, self._sums = self._sums, UsageCounts()
            self._count(counts)
