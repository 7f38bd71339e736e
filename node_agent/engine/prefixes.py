"""Keys of KV blocks, so that requests with a common prefix need not compute it again.

A key is a hash of all tokens up to the end of the block, of the adapter's digest, of the tenant and of the request's
`cache_salt`. Keys and values depend on the tokens and the adapter. The tenant is included so that response times reveal
nothing about other tenants' texts, and the salt does the same among a tenant's users.
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
"""Number of shared tokens from which a request waits until another one has computed them. Computing fewer takes no more
than one pass."""
URGENCY: dict[SloClass, int] = {"best_effort": 0, "standard": 1, "strict": 2}


class Prefixes:
    """Lookup and caching of the KV blocks of requests' prefixes."""

    def __init__(self, blocks: BlockPool, enabled: bool) -> None:
        self.blocks, self._enabled = blocks, enabled

    def find(self, request: Request) -> list[int]:
        """Returns the cached blocks of the request's prefix. At least one token is left to compute, for the next
        token's logits. Returns an empty list if prompt log probabilities are requested."""
        if not self._may_find(request):
            return []
        return self.blocks.find(self._keys(request, (len(request.tokens) - 1) // self.blocks.block_tokens))

    def being_computed(self, request: Request, running: Iterable[Request]) -> bool:
        """Returns whether a running request is computing at least WORTH_WAITING further tokens of this request's
        prefix. Computing them twice would delay both. Less urgent requests are not waited for, as they may be delayed;
        nor are those that mostly compute other tokens."""
        last = len(self.find(request)) + -(-WORTH_WAITING // self.blocks.block_tokens) - 1
        if not self._may_find(request) or last >= len(request.block_keys):
            return False
        return any(self._spares(candidate, request, last) for candidate in running)

    def _spares(self, candidate: Request, request: Request, last: int) -> bool:
        """Returns whether the request should wait for `candidate`, which computes the request's blocks up to number
        `last`."""
        keys, other_keys = request.block_keys, candidate.block_keys
        if not candidate.known_blocks <= last < len(other_keys) or other_keys[last] != keys[last]:
            return False
        # A key covers all blocks up to its own, so all keys after the first difference differ.
        common = bisect_left(range(min(len(keys), len(other_keys))), True, key=lambda at: keys[at] != other_keys[at])
        is_mostly_shared = 2 * common * self.blocks.block_tokens >= candidate.uncomputed
        return is_mostly_shared and URGENCY[candidate.slo_class] >= URGENCY[request.slo_class]

    def learn(self, request: Request) -> None:
        """Makes the request's full blocks available to others. Called after finite logits have shown that its keys and
        values are valid."""
        full_blocks = request.computed // self.blocks.block_tokens
        if self._enabled and full_blocks > request.known_blocks:
            new = slice(request.known_blocks, full_blocks)
            self.blocks.learn(self._keys(request, full_blocks)[new], request.blocks[new])
            request.known_blocks = full_blocks

    def _may_find(self, request: Request) -> bool:
        return self._enabled and request.sampling.prompt_logprobs is None

    def _keys(self, request: Request, count: int) -> Sequence[bytes]:
        """Returns the keys of the request's first `count` blocks."""
        keys, size = request.block_keys, self.blocks.block_tokens
        for at in range(len(keys) * size, count * size, size):
            before = keys[-1] if keys else _root(request)
            keys.append(sha256(before + array("q", request.tokens[at : at + size]).tobytes()).digest())
        return keys[:count]


def _root(request: Request) -> bytes:
    digest = "" if request.adapter is None else request.adapter.digest
    return sha256(f"{digest}\n{request.cache_owner}".encode()).digest()
