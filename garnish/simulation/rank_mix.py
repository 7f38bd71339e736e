"""The ranks and adapters of a changing set of requests."""

from __future__ import annotations

from collections.abc import Callable

from cluster.performance_model import RankTerm


class RankMix:
    """The ranks and adapters of a changing set of requests. All sums are kept, so that asking costs nothing that grows
    with the set."""

    __slots__ = ("adapter_ranks", "adapters", "ranks", "request_ranks", "rows")

    def __init__(self) -> None:
        self.rows = 0
        self.request_ranks = 0
        self.adapter_ranks = 0
        self.ranks: dict[int, int] = {}
        self.adapters: dict[str, int] = {}

    def add(self, digest: str | None, rank: int) -> None:
        self.rows += 1
        self.request_ranks += rank
        self.ranks[rank] = self.ranks.get(rank, 0) + 1
        if digest is not None:
            before = self.adapters.get(digest, 0)
            self.adapters[digest] = before + 1
            if not before:
                self.adapter_ranks += rank

    def remove(self, digest: str | None, rank: int) -> None:
        self.rows -= 1
        self.request_ranks -= rank
        if self.ranks[rank] == 1:
            del self.ranks[rank]
        else:
            self.ranks[rank] -= 1
        if digest is not None:
            if self.adapters[digest] == 1:
                del self.adapters[digest]
                self.adapter_ranks -= rank
            else:
                self.adapters[digest] -= 1

    @property
    def max_rank(self) -> int:
        return max(self.ranks, default=0)


RANK_TERM: dict[RankTerm, Callable[[RankMix], int]] = {
    "max_rank": lambda mix: mix.rows * mix.max_rank,
    "request_ranks": lambda mix: mix.request_ranks,
    "adapter_ranks": lambda mix: mix.adapter_ranks,
}
"""R(S) of cluster.performance_model."""
