"""Expected lengths of answers, learnt per function from those that ended."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

MEMORY = 20
"""Answers that a mean looks back on: the first ones count equally, later ones with 1/MEMORY each."""
SPREAD_MEMORY = 1000
"""The same for how unlike answers are: very short ones are rare, and weigh much."""
MAX_FUNCTIONS = 65_536
MAX_TENANTS = 8_192

K = TypeVar("K")


class _Mean:
    __slots__ = ("count", "memory", "value")

    def __init__(self, memory: int = MEMORY) -> None:
        self.value, self.count, self.memory = 0.0, 0, memory

    def add(self, value: float) -> None:
        self.count = min(self.count + 1, self.memory)
        self.value += (value - self.value) / self.count


class _Means(Generic[K]):
    """Means of the keys that were added to last."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._means: OrderedDict[K, _Mean] = OrderedDict()

    def add(self, key: K, value: float) -> None:
        mean = self._means.get(key)
        if mean is None:
            mean = self._means[key] = _Mean()
            if len(self._means) > self._limit:
                self._means.popitem(last=False)
        self._means.move_to_end(key)
        mean.add(value)

    def get(self, key: K) -> float | None:
        mean = self._means.get(key)
        return None if mean is None else mean.value


class ResponseLengths:
    def __init__(self, *, max_functions: int = MAX_FUNCTIONS, max_tenants: int = MAX_TENANTS) -> None:
        self._functions: _Means[tuple[str, str]] = _Means(max_functions)
        self._tenants: _Means[str] = _Means(max_tenants)
        self._all = _Mean()
        self._tokens, self._inverses = _Mean(SPREAD_MEMORY), _Mean(SPREAD_MEMORY)

    def record(self, tenant: str, function: str, tokens: int) -> None:
        """Records an answer that ended by itself, or at its `max_tokens`."""
        self._functions.add((tenant, function), tokens)
        self._tenants.add(tenant, tokens)
        self._all.add(tokens)
        self._tokens.add(max(1, tokens))
        self._inverses.add(1 / max(1, tokens))

    def expected(self, tenant: str, function: str, max_tokens: int) -> float:
        """Tokens: as the function's answers, else its tenant's, else everybody's; while there are none, half of
        `max_tokens`. From 1 to `max_tokens`."""
        mean = self._functions.get((tenant, function))
        if mean is None:
            mean = self._tenants.get(tenant)
        if mean is None:
            mean = self._all.value if self._all.count else max_tokens / 2
        return max(1.0, min(mean, float(max_tokens)))

    def inverse(self, expected: float) -> float:
        """Returns the mean of 1 / tokens, at most 1, where `expected` tokens are expected.

        It is more than 1 / expected, for short answers weigh more in it than long ones. Answers of a function are taken
        to be as unlike as everybody's."""
        spread = self._tokens.value * self._inverses.value
        return min(1.0, max(1.0, spread) / expected)

    def typical(self) -> float:
        """Returns the mean number of tokens in everybody's latest answers; 0 while there are none."""
        return self._all.value
