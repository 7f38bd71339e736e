"""Owners of KV-cache blocks, and blocks cached for reuse as prefixes.

A full block is identified by a key of everything that its keys and values depend on (`prefixes.py`). Requests with the
same prefix share it, even concurrently, since nobody writes to a full block. An unused block stays cached until its
memory is needed; the least recently used goes first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from node_agent.device_event import Event


class BlockPool:
    """Blocks 1..n-1. Block 0 is never allocated: it stays zero, and padding reads it.

    If padding read a request's block instead, a NaN in it could reach another row's attention, since 0 * NaN is NaN.
    """

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"kv_memory holds {num_blocks} blocks; at least 2 are needed")
        self.block_tokens = block_tokens
        self.total = num_blocks - 1
        self._users = [0] * num_blocks
        """number of users of each block"""
        self.shared = 0
        """number of users beyond the first one of each block, summed over all blocks"""
        self._blank = list(range(num_blocks - 1, 0, -1))
        """free blocks that are not cached"""
        self._idle = OrderedDict[int, None]()
        """free blocks that are cached, least recently used first"""
        self._by_key: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        """key of each cached block"""
        self._releasing: list[tuple[list[int], Sequence[Event]]] = []

    @property
    def free(self) -> int:
        """Returns the number of blocks without users, cached ones included."""
        return len(self._blank) + len(self._idle)

    def blocks_for(self, tokens: int) -> int:
        """Returns the number of blocks for this number of tokens."""
        return -(-tokens // self.block_tokens)

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Returns the cached blocks of these keys, up to the first key that is not cached."""
        blocks = list[int]()
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def in_use(self, blocks: Sequence[int]) -> int:
        """Returns how many of the blocks have users."""
        return sum(self._users[block] > 0 for block in blocks)

    def allocate(self, blocks: int, cached: Sequence[int] = ()) -> list[int] | None:
        """Allocates `blocks` blocks, of which the first are the `cached` ones just returned by `find`. Returns None
        when too few are free."""
        more = blocks - len(cached)
        if more > self.free - sum(block in self._idle for block in cached):
            return None
        for block in cached:
            self._idle.pop(block, None)
        allocated = [*cached, *(self._blank.pop() if self._blank else self._forget_oldest() for _ in range(more))]
        for block in allocated:
            self.shared += self._users[block] > 0
            self._users[block] += 1
        return allocated

    def learn(self, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Caches these full blocks, which are in use, under their keys. Skips blocks whose key is already cached."""
        for key, block in zip(keys, blocks, strict=True):
            if key not in self._by_key and block not in self._keys:
                self._by_key[key], self._keys[block] = block, key

    def let_go(self, freed: Counter[int], blocks: Sequence[int]) -> int:
        """Counts in `freed` that one user leaves each of the blocks. Returns how many of these blocks would have no
        user after all departures counted in `freed`."""
        if not self.shared:
            return len(blocks)
        freed.update(blocks)
        return sum(freed[block] == self._users[block] for block in blocks)

    def release(self, blocks: list[int], after: Sequence[Event] = ()) -> None:
        """Removes a user of the blocks once all events in `after` have ended, at the next `poll`."""
        self._releasing.append((blocks, after))
        self.poll()

    def poll(self) -> None:
        """Frees the released blocks whose events have ended. Raises RuntimeError when a block was released twice."""
        releasing, self._releasing = self._releasing, []
        for blocks, after in releasing:
            if all(event.query() for event in after):
                self._end_use(blocks)
            else:
                self._releasing.append((blocks, after))

    def _end_use(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):  # later blocks are useless without earlier ones, so they are evicted first
            if not self._users[block]:
                raise RuntimeError("a KV block was released twice")
            self._users[block] -= 1
            if self._users[block]:
                self.shared -= 1
            elif block in self._keys:
                self._idle[block] = None
            else:
                self._blank.append(block)

    def _forget_oldest(self) -> int:
        block, _ = self._idle.popitem(last=False)
        del self._by_key[self._keys.pop(block)]
        return block
