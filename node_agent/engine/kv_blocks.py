"""Which KV-cache block belongs to which request."""

from __future__ import annotations

from collections.abc import Sequence

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
        self._free = list(range(num_blocks - 1, 0, -1))
        self._releasing: list[tuple[list[int], Sequence[Event]]] = []

    @property
    def free(self) -> int:
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def allocate(self, blocks: int) -> list[int] | None:
        """Takes so many blocks. Returns None when fewer are free."""
        if blocks > len(self._free):
            return None
        taken = self._free[len(self._free) - blocks :]
        del self._free[len(self._free) - blocks :]
        return taken

    def release(self, blocks: list[int], after: Sequence[Event] = ()) -> None:
        """They are free as soon as every event in `after` has ended and `poll` has seen that."""
        self._releasing.append((blocks, after))
        self.poll()

    def poll(self) -> None:
        """Frees released blocks that the device no longer uses. Raises RuntimeError when a block was released twice."""
        releasing, self._releasing = self._releasing, []
        for blocks, after in releasing:
            if all(event.query() for event in after):
                self._free.extend(blocks)
            else:
                self._releasing.append((blocks, after))
        if len(self._free) > self.total:
            raise RuntimeError("a KV block was released twice")
