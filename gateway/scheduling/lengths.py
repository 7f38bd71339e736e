"""Expected lengths of answers, learned per function from completed answers."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

MEMORY = 20
"""Number of answers over which a mean is taken. The first MEMORY answers weigh equally; each later one has the weight 1
/ MEMORY."""
SPREAD_MEMORY = 1000
"""Number of answers over which the means are taken that measure the spread of lengths. It is larger because very short
answers are rare and weigh much."""
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
    """Running means by key. Beyond `limit` keys, the least recently updated one is dropped."""

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
        """Records the length of an answer that reached its end or its `max_tokens`."""
        self._functions.add((tenant, function), tokens)
        self._tenants.add(tenant, tokens)
        self._all.add(tokens)
        self._tokens.add(max(1, tokens))
        self._inverses.add(1 / max(1, tokens))

    def expected(self, tenant: str, function: str, max_tokens: int) -> float:
        """Returns the expected tokens of an answer, from 1 to `max_tokens`.

        This is the mean of the function's answers, else of its tenant's, else of all answers. Without any answer it is
        half of `max_tokens`.
        """
        mean = self._functions.get((tenant, function))
        if mean is None:
            mean = self._tenants.get(tenant)
        if mean is None:
            mean = self._all.value if self._all.count else max_tokens / 2
        return max(1.0, min(mean, float(max_tokens)))

    def inverse(self, expected: float) -> float:
        """Returns the expected value of 1 / tokens, at most 1, for an answer of `expected` tokens.

        It exceeds 1 / expected, because short answers weigh more in it than long ones. The relative spread of a
        function's lengths is assumed to be that of all answers.
        """
        spread = self._tokens.value * self._inverses.value
        return min(1.0, max(1.0, spread) / expected)

    def typical(self) -> float:
        """Returns the mean number of tokens in the latest answers of all functions; 0 before the first one."""
        return self._all.value
