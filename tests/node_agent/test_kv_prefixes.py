"""The pool of KV blocks with prefixes that come again, against what each block was last written with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.messages import Adapter, Sampling
from node_agent.device_event import EndedEvent
from node_agent.engine.kv_blocks import BlockPool
from node_agent.engine.prefixes import Prefixes
from node_agent.engine.request import Request
from tests.support.draws import draws

BLOCK = 4
TEXTS = st.lists(st.integers(1, 2), min_size=1, max_size=30)
"""Of two tokens: many begin alike."""


class Late(EndedEvent):
    """Ends when it is told to."""

    ended = False

    def query(self) -> bool:
        return self.ended


def request_of(tokens: list[int], tenant: str = "a", digest: str = "", **sampling: int) -> Request:
    adapter = Adapter(digest, "", 1, (8,)) if digest else None
    return Request("r", tenant, list(tokens), 8, Sampling(**sampling), 0.0, adapter, False)  # type: ignore[arg-type]


class World:
    """`written`: of each block, by place, who wrote what; a request may read only what it would have written itself."""

    def __init__(self, blocks: int) -> None:
        self.pool = BlockPool(blocks + 1, BLOCK)
        self.prefixes = Prefixes(self.pool, True)
        self.written: dict[int, list[object]] = {}
        self.running: list[Request] = []
        self.pending: list[tuple[Sequence[int], Late]] = []

    def begin(self, request: Request) -> bool:
        need = self.pool.blocks_for(len(request.tokens) + request.max_tokens)
        free = self.pool.free
        known = self.prefixes.find(request)
        taken = self.pool.allocate(need, known)
        if taken is None:
            assert self.pool.free == free and free < need
            return False
        assert 0 not in taken and len(set(taken)) == need
        idle = [block for block in taken if not any(block in other.blocks for other in self.running)]
        late = {block for blocks, _ in self.pending for block in blocks}
        assert not (set(taken[len(known) :]) & late) and len(idle) >= need - len(known)
        request.blocks, request.known_blocks, request.computed = taken, len(known), len(known) * BLOCK
        assert request.computed < len(request.tokens)
        for place in range(request.computed):
            assert self.written[taken[place // BLOCK]][place % BLOCK] == self.mark(request, place)
        for block in taken[len(known) :]:
            self.written[block] = [None] * BLOCK
        self.running.append(request)
        return True

    def mark(self, request: Request, place: int) -> object:
        """What keys and values at the place depend on."""
        return request.tenant, request.adapter and request.adapter.digest, tuple(request.tokens[: place + 1])

    def compute(self, request: Request, length: int) -> None:
        end = min(request.computed + length, len(request.tokens))
        for place in range(request.computed, end):
            self.written[request.blocks[place // BLOCK]][place % BLOCK] = self.mark(request, place)
        request.computed = end
        if end == len(request.tokens):
            self.prefixes.learn(request)
            if len(request.tokens) < 34 and request.generated < request.max_tokens:
                request.tokens.append(1 + len(request.tokens) % 2)

    def end(self, request: Request, event: Late) -> None:
        self.running.remove(request)
        if not event.ended:
            self.pending.append((request.blocks, event))
        self.pool.release(request.blocks, [event])

    def settle(self) -> None:
        for _, event in self.pending:
            event.ended = True
        self.pending.clear()
        self.pool.poll()


@settings(max_examples=draws(200))
@given(st.data())
def test_what_a_request_finds_is_what_it_would_have_computed(data: st.DataObject) -> None:
    world = World(data.draw(st.integers(8, 30)))
    for _ in range(data.draw(st.integers(1, 40))):
        do = data.draw(st.sampled_from(["begin", "begin", "compute", "compute", "end", "settle"]))
        if do == "begin":
            tenant, digest = data.draw(st.sampled_from("ab")), data.draw(st.sampled_from(["", "d"]))
            world.begin(request_of(data.draw(TEXTS), tenant, digest))
        elif do == "settle":
            world.settle()
        elif world.running:
            request = data.draw(st.sampled_from(world.running))
            if do == "compute":
                world.compute(request, data.draw(st.integers(1, 20)))
            else:
                event = Late()
                event.ended = data.draw(st.booleans())
                world.end(request, event)
        used = {block for request in world.running for block in request.blocks}
        used |= {block for blocks, _ in world.pending for block in blocks}
        found = world.prefixes.find(request_of(data.draw(TEXTS)))
        assert world.pool.in_use(found) == len(used & set(found))
        assert world.pool.free == world.pool.total - len(used)
        gone = Counter[int]()
        together = sum(world.pool.let_go(gone, request.blocks) for request in world.running)
        late = {block for blocks, _ in world.pending for block in blocks}
        assert together == len(used - late)
        uses = sum(len(request.blocks) for request in world.running) + sum(len(blocks) for blocks, _ in world.pending)
        assert world.pool.shared == uses - len(used)
    for request in list(world.running):
        world.end(request, Late())
    world.settle()
    assert world.pool.free == world.pool.total
    assert sorted(world.pool.allocate(world.pool.total) or []) == list(range(1, world.pool.total + 1))


def left_behind(world: World, request: Request) -> None:
    assert world.begin(request)
    while request.generated < 2:
        world.compute(request, 100)
    ended = Late()
    ended.ended = True
    world.end(request, ended)


def test_whole_blocks_are_found_and_one_token_is_left() -> None:
    world, text = World(30), [1, 2] * 8
    left_behind(world, request_of(text))
    for length, found in ((16, 3), (15, 3), (13, 3), (12, 2), (5, 1), (4, 0)):
        assert len(world.prefixes.find(request_of(text[:length]))) == found, length
    assert len(world.prefixes.find(request_of([*text, 9]))) == 4
    assert world.prefixes.find(request_of([2, *text])) == []
    assert world.prefixes.find(request_of(text, prompt_logprobs=1)) == [], "all of them are to be scored"


@pytest.mark.parametrize("other", [{"tenant": "b"}, {"digest": "d"}, {"tenant": "b", "digest": "d"}])
def test_other_tenants_and_adapters_find_nothing(other: dict[str, str]) -> None:
    world, text = World(30), [1, 2] * 8
    left_behind(world, request_of(text))
    assert world.prefixes.find(request_of(text, **other)) == []


def test_the_oldest_text_is_forgotten_first_and_from_its_end() -> None:
    world = World(16)
    old, new = [1] * 16, [2] * 16
    left_behind(world, request_of(old))
    left_behind(world, request_of(new))
    assert world.pool.allocate(16 - 6) is not None
    assert len(world.prefixes.find(request_of([*old, 9]))) == 2
    assert len(world.prefixes.find(request_of([*new, 9]))) == 4


def test_nothing_is_kept_where_it_is_off() -> None:
    world = World(30)
    world.prefixes = Prefixes(world.pool, False)
    left_behind(world, request_of([1, 2] * 8))
    assert world.prefixes.find(request_of([1, 2] * 8)) == []
