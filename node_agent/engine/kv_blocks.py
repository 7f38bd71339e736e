"""Owners of KV-cache blocks, and the blocks that hold the beginning of a text that may come again.

A whole block is known by what its keys and values were computed from (`prefixes.py`). Requests that begin so use it as
it is, also at once: nobody writes to a whole block. One that nobody uses stays known until its memory is needed, the
least recently used first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from node_agent.device import Event


class BlockPool:
    """Blocks 1..n-1; block 0 is never handed out: it stays zero, and padding reads it.

    A padded read of a block that some request wrote could carry that request's NaN into another row's attention, for
    0 * NaN is NaN.
    """

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"kv_memory holds {num_blocks} blocks; at least 2 are needed")
        self.block_tokens = block_tokens
        self.total = num_blocks - 1
        self._users = [0] * num_blocks
        """number of users by block"""
        self.shared = 0
        """uses beyond each block's first"""
        self._blank = list(range(num_blocks - 1, 0, -1))
        """free, and not known"""
        self._idle = OrderedDict[int, None]()
        """free, and known; the least recently used first"""
        self._by_key: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        """key by block"""
        self._releasing: list[tuple[list[int], Sequence[Event]]] = []

    @property
    def free(self) -> int:
        """Returns how many nobody uses, known ones included."""
        return len(self._blank) + len(self._idle)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Returns the blocks of these keys, up to the first that is not known."""
        blocks = list[int]()
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def in_use(self, blocks: Sequence[int]) -> int:
        """Returns how many of the blocks are not free."""
        return sum(self._users[block] > 0 for block in blocks)

    def allocate(self, blocks: int, cached: Sequence[int] = ()) -> list[int] | None:
        """Takes `blocks` blocks, of which the first are the `cached` ones, as `find` has just returned them. Returns
        None when fewer are free."""
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
        """Makes these whole blocks, which somebody uses, known by these keys. A block whose key another one has does
        not become known."""
        for key, block in zip(keys, blocks, strict=True):
            if key not in self._by_key and block not in self._keys:
                self._by_key[key], self._keys[block] = block, key

    def let_go(self, freed: Counter[int], blocks: Sequence[int]) -> int:
        """Counts in `freed` that a user of the blocks would go. Returns how many of them would then be free."""
        if not self.shared:
            return len(blocks)
        freed.update(blocks)
        return sum(freed[block] == self._users[block] for block in blocks)

    def release(self, blocks: list[int], after: Sequence[Event] = ()) -> None:
        """A user of the blocks goes as soon as every event in `after` has ended and `poll` has seen that."""
        self._releasing.append((blocks, after))
        self.poll()

    def poll(self) -> None:
        """Frees released blocks that the device no longer uses. Raises RuntimeError when a block was released twice."""
        releasing, self._releasing = self._releasing, []
        for blocks, after in releasing:
            if all(event.query() for event in after):
                self._end_use(blocks)
            else:
                self._releasing.append((blocks, after))

    def _end_use(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):  # without its beginning the end of a text is of no use, so it is forgotten first
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
