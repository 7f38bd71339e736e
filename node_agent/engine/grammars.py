"""Grammars of requests: compiled in threads of their own, cached, and advanced by each token."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from threading import Lock
from time import monotonic, thread_time

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from cluster.grammars import compiled_form, limits
from cluster.messages import Grammar

log = logging.getLogger("garnish.engine")

THREADS = 2
CACHED = 64
"""Maximum number of compiled grammars that are kept."""
CACHED_BYTES = 256 << 20
"""Maximum memory of them, by the estimate of BYTES_PER_SECOND."""
BYTES_PER_SECOND = 512 << 20
"""Memory that llguidance takes in one second of processor time, at most. It does not say what a grammar holds, and
grammars grow with each new kind of step."""
QUICK_MASK_SECONDS = 1e-4
"""Processor time of a mask that adds nothing to its grammar."""
MAX_MASK_SECONDS = 0.2
"""Maximum processor time of a first mask. Forms with much repetition inside of repetition take more, and
some 100 MB."""
MAX_STEP_SECONDS = 0.1
"""Processor time of a later mask after which the request ends, since masks delay all rows of a batch."""
REFUSED_SECONDS = 60.0
"""Time for which a grammar that was too slow is not tried again."""
MAX_REFUSED = 1024
"""Maximum number of slow grammars that are remembered, by their digests."""


class RequestGrammar:
    """Grammar of one request. Its state follows the generated tokens. After `ready` only the engine's thread uses
    it."""

    def __init__(self, compiling: Future[LLMatcher], vocab_size: int, on_mask: Callable[[float], None]) -> None:
        """`on_mask` is called with the processor time of each mask."""
        self._compiling, self._vocab_size, self._on_mask = compiling, vocab_size, on_mask
        self.slow = ""
        """reason if a mask took too long"""

    @property
    def ready(self) -> bool:
        """Returns whether the compilation has ended."""
        return self._compiling.done()

    @property
    def problem(self) -> str:
        """Returns why the grammar can't be followed, or not any more; an empty text if it can."""
        if not self.ready:
            return ""
        if self.slow:
            return self.slow
        error = self._compiling.exception()
        return str(error) if error is not None else str(self._compiling.result().get_error())

    @property
    def ended(self) -> bool:
        """Returns whether the output is complete, so that no token may follow."""
        return bool(self._compiling.result().is_stopped())

    def append_token(self, token: int) -> None:
        """Advances the grammar by a generated token."""
        self._compiling.result().consume_token(token)

    def mask(self) -> np.ndarray:
        """Returns the tokens that may come next, as bits: i32[ceil(vocabulary / 32)], the lowest bit first."""
        bits, began = allocate_token_bitmask(1, self._vocab_size), thread_time()
        fill_next_token_bitmask(self._compiling.result(), bits)
        took = thread_time() - began
        self._on_mask(took)
        if took > MAX_STEP_SECONDS:
            self.slow = f"a step of it takes {took:.1f} s of processor time; {MAX_STEP_SECONDS} s are allowed"
        return np.asarray(bits[0])


@dataclass
class _Compiled:
    """Compiled grammar, whose parts all copies share. `cost`: estimate of its memory in bytes."""

    matcher: LLMatcher
    cost: float


class _SlowGrammar(ValueError):
    """A grammar takes too much processor time."""


class Grammars:
    """Compiler of grammars for one engine, with a cache. The tokenizer is read at the start of the engine, because
    llguidance holds the interpreter's lock while it reads it."""

    def __init__(
        self, tokenizer: Path, vocab_size: int, eos_ids: frozenset[int], on_change: Callable[[], None]
    ) -> None:
        """`tokenizer`: file tokenizer.json. `on_change` is called, in any thread, when a grammar is compiled."""
        self._vocab_size, self._on_change = vocab_size, on_change
        self._tokenizer = _read_tokenizer(tokenizer, vocab_size, eos_ids)
        self._threads = ThreadPoolExecutor(THREADS, "grammar")
        self._lock = Lock()
        self._compiled: OrderedDict[Grammar, _Compiled] = OrderedDict()
        self._refused: OrderedDict[bytes, tuple[float, str]] = OrderedDict()
        """time until which each slow grammar is not tried, in monotonic seconds, and the reason, by its digest"""

    @property
    def cached_bytes(self) -> float:
        """Returns the estimate of the memory of the kept grammars."""
        with self._lock:
            return sum(compiled.cost for compiled in self._compiled.values())

    def start(self, grammar: Grammar, generated: Sequence[int]) -> RequestGrammar:
        """Starts the compilation. `generated`: tokens that another node has generated, by which the state is
        advanced."""
        compiling = self._threads.submit(self._compile, grammar, list(generated))
        compiling.add_done_callback(lambda _: self._on_change())
        return RequestGrammar(compiling, self._vocab_size, partial(self._record_mask, grammar))

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)

    def _compile(self, grammar: Grammar, generated: list[int]) -> LLMatcher:
        """Returns the grammar after these tokens. Raises ValueError if it can't be compiled, or does not allow them."""
        if self._tokenizer is None:
            raise ValueError("the base model's tokenizer can't be read for it (the node's log has the reason)")
        with self._lock:
            refused_until, why = self._refused.get(_digest(grammar), (0.0, ""))
            compiled = self._compiled.get(grammar)
        if monotonic() < refused_until:
            raise ValueError(why)
        began = thread_time()
        if compiled is None:
            matcher = LLMatcher(self._tokenizer, compiled_form(grammar), log_level=0, limits=limits())
            if matcher.is_error():
                raise ValueError(matcher.get_error())
            compiled = _Compiled(matcher, len(grammar.text))
        copy = compiled.matcher.deep_copy()
        if generated and not copy.consume_tokens(generated):
            raise ValueError(f"the tokens generated so far are not of this form: {copy.get_error()}")
        try:
            self._compute_first_mask(copy)
        except _SlowGrammar as slow:
            self.forget(grammar, str(slow))
            raise
        with self._lock:
            self._compiled.setdefault(grammar, compiled)
            self._compiled.move_to_end(grammar)
        self._add_cost(grammar, thread_time() - began)
        return copy

    def _record_mask(self, grammar: Grammar, seconds: float) -> None:
        if seconds > QUICK_MASK_SECONDS:
            self._add_cost(grammar, seconds)

    def _add_cost(self, grammar: Grammar, seconds: float) -> None:
        """Adds what the grammar has grown by in this processor time, and drops those that were not used for longest."""
        with self._lock:
            if (compiled := self._compiled.get(grammar)) is not None:
                compiled.cost += seconds * BYTES_PER_SECOND
            cost = sum(each.cost for each in self._compiled.values())
            while self._compiled and (cost > CACHED_BYTES or len(self._compiled) > CACHED):
                cost -= self._compiled.popitem(last=False)[1].cost

    def forget(self, grammar: Grammar, slow: str = "") -> None:
        """Drops a grammar that could not be followed from the cache. Its masks may have taken much memory, which all
        copies share. `slow`: reason if it was too slow, for which it is not tried again for a while."""
        with self._lock:
            self._compiled.pop(grammar, None)
            if slow:
                self._refused[_digest(grammar)] = (monotonic() + REFUSED_SECONDS, slow)
                while len(self._refused) > MAX_REFUSED:
                    self._refused.popitem(last=False)

    def _compute_first_mask(self, matcher: LLMatcher) -> None:
        """Computes the first mask in this thread, because it takes longest. Its work is kept for all copies. Raises
        ValueError if no token may follow, or if it took too long."""
        begin = thread_time()
        fill_next_token_bitmask(matcher, allocate_token_bitmask(1, self._vocab_size))
        took = thread_time() - begin
        problem = matcher.get_error()
        if took > MAX_MASK_SECONDS:
            raise _SlowGrammar(f"to find the first token took {took:.2f} s; repeat fewer parts inside of each other")
        if problem:
            raise ValueError(problem)


def _digest(grammar: Grammar) -> bytes:
    return sha256(f"{grammar.kind} {grammar.text}".encode()).digest()


def _read_tokenizer(file: Path, vocab_size: int, eos_ids: frozenset[int]) -> LLTokenizer | None:
    """Returns the tokenizer; None, with a warning in the log, if llguidance can't read it. The node serves other calls
    all the same."""
    try:
        return LLTokenizer(str(file), n_vocab=vocab_size, eos_token=sorted(eos_ids))
    except ValueError as error:
        log.warning("structured output is off: llguidance can't read %s", file, extra={"reason": str(error)})
        return None
