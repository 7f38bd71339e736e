"""Keys of a text's blocks, so that a request that begins as another one did need not compute it again.

A key is a hash of all tokens up to its block's end, of the adapter's digest and of the tenant: keys and values depend
on the first two, and how fast an answer comes must reveal nothing of another tenant's texts.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from hashlib import sha256

from cluster.messages import SloClass
from node_agent.engine.kv_blocks import BlockPool
from node_agent.engine.request import Request

WORTH_WAITING = 128
"""Shared tokens from which a request waits for another one that is computing them. Fewer take no longer than one more
pass."""
URGENCY: dict[SloClass, int] = {"best_effort": 0, "standard": 1, "strict": 2}


class Prefixes:
    def __init__(self, blocks: BlockPool, enabled: bool) -> None:
        self.blocks, self._enabled = blocks, enabled

    def find(self, request: Request) -> list[int]:
        """Returns the blocks that hold the beginning of its tokens. At least one token is left to be computed, for the
        next one's scores; and all of them where the prompt's are asked for."""
        if not self._may_find(request):
            return []
        return self.blocks.find(self._keys(request, (len(request.tokens) - 1) // self.blocks.block_tokens))

    def being_computed(self, request: Request, running: Iterable[Request]) -> bool:
        """Returns whether one of those that run is computing what the request begins with, WORTH_WAITING tokens or more
        beyond what is there: computed twice they would take both of them longer. Not waited for is one that is less
        urgent, since its computation may be put off, and one that mostly computes what the request does not want."""
        last = len(self.find(request)) + -(-WORTH_WAITING // self.blocks.block_tokens) - 1
        if not self._may_find(request) or last >= len(request.block_keys):
            return False
        return any(self._spares(candidate, request, last) for candidate in running)

    def _spares(self, candidate: Request, request: Request, last: int) -> bool:
        """Returns whether waiting for `candidate` spares the request its blocks up to number `last`, and is worth
        it."""
        keys, other_keys = request.block_keys, candidate.block_keys
        if not candidate.known_blocks <= last < len(other_keys) or other_keys[last] != keys[last]:
            return False
        # A key stands for all blocks up to its own: behind the first that differs all do.
        common = bisect_left(range(min(len(keys), len(other_keys))), True, key=lambda at: keys[at] != other_keys[at])
        is_mostly_shared = 2 * common * self.blocks.block_tokens >= candidate.uncomputed
        return is_mostly_shared and URGENCY[candidate.slo_class] >= URGENCY[request.slo_class]

    def learn(self, request: Request) -> None:
        """The scores behind all that the request has computed have come out finite, and so what they were computed
        from: others may use it."""
        full_blocks = request.computed // self.blocks.block_tokens
        if self._enabled and full_blocks > request.known_blocks:
            new = slice(request.known_blocks, full_blocks)
            self.blocks.learn(self._keys(request, full_blocks)[new], request.blocks[new])
            request.known_blocks = full_blocks

    def _may_find(self, request: Request) -> bool:
        return self._enabled and request.sampling.prompt_logprobs is None

    def _keys(self, request: Request, count: int) -> Sequence[bytes]:
        """Returns the keys of its first `count` blocks."""
        keys, size = request.block_keys, self.blocks.block_tokens
        for at in range(len(keys) * size, count * size, size):
            before = keys[-1] if keys else _root(request)
            keys.append(sha256(before + array("q", request.tokens[at : at + size]).tobytes()).digest())
        return keys[:count]


def _root(request: Request) -> bytes:
    digest = "" if request.adapter is None else request.adapter.digest
    return sha256(f"{digest}\n{request.tenant}".encode()).digest()
