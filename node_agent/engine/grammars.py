"""Grammars of requests: compiled in threads of their own, cached, and advanced by each token."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from time import thread_time

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from cluster.grammars import compiled_form, limits
from cluster.messages import Grammar

log = logging.getLogger("garnish.engine")

THREADS = 2
CACHED = 64
"""Number of compiled grammars that are kept."""
MAX_MASK_SECONDS = 0.2
"""Maximum processor time of a first mask. Forms with much repetition inside of repetition take more, and
some 100 MB."""
MAX_STEP_SECONDS = 0.1
"""Processor time of a later mask after which the request ends, since masks delay all rows of a batch."""


class RequestGrammar:
    """Grammar of one request. Its state follows the generated tokens. After `ready` only the engine's thread uses
    it."""

    def __init__(self, compiling: Future[LLMatcher], vocab_size: int) -> None:
        self._compiling, self._vocab_size = compiling, vocab_size
        self._slow = ""
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
        if self._slow:
            return self._slow
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
        if took > MAX_STEP_SECONDS:
            self._slow = f"a step of it takes {took:.1f} s of processor time; {MAX_STEP_SECONDS} s are allowed"
        return np.asarray(bits[0])


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
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()

    def start(self, grammar: Grammar, generated: Sequence[int]) -> RequestGrammar:
        """Starts the compilation. `generated`: tokens that another node has generated, by which the state is
        advanced."""
        compiling = self._threads.submit(self._compile, grammar, list(generated))
        compiling.add_done_callback(lambda _: self._on_change())
        return RequestGrammar(compiling, self._vocab_size)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)

    def _compile(self, grammar: Grammar, generated: list[int]) -> LLMatcher:
        """Returns the grammar after these tokens. Raises ValueError if it can't be compiled, or does not allow them."""
        with self._lock:
            compiled = self._compiled.get(grammar)
        if self._tokenizer is None:
            raise ValueError("the base model's tokenizer can't be read for it (the node's log has the reason)")
        if compiled is None:
            compiled = LLMatcher(self._tokenizer, compiled_form(grammar), log_level=0, limits=limits())
            if compiled.is_error():
                raise ValueError(compiled.get_error())
        matcher = compiled.deep_copy()
        if generated and not matcher.consume_tokens(generated):
            raise ValueError(f"the tokens generated so far are not of this form: {matcher.get_error()}")
        self._compute_first_mask(matcher)
        with self._lock:
            self._compiled[grammar] = compiled
            self._compiled.move_to_end(grammar)
            while len(self._compiled) > CACHED:
                self._compiled.popitem(last=False)
        return matcher

    def forget(self, grammar: Grammar) -> None:
        """Drops a grammar that could not be followed from the cache. Its masks may have taken much memory, which all
        copies share."""
        with self._lock:
            self._compiled.pop(grammar, None)

    def _compute_first_mask(self, matcher: LLMatcher) -> None:
        """Computes the first mask in this thread, because it takes longest. Its work is kept for all copies. Raises
        ValueError if no token may follow, or if it took too long."""
        begin = thread_time()
        fill_next_token_bitmask(matcher, allocate_token_bitmask(1, self._vocab_size))
        took = thread_time() - begin
        if problem := matcher.get_error():
            raise ValueError(problem)
        if took > MAX_MASK_SECONDS:
            raise ValueError(f"to find the first token took {took:.2f} s; repeat fewer parts inside of each other")


def _read_tokenizer(file: Path, vocab_size: int, eos_ids: frozenset[int]) -> LLTokenizer | None:
    """Returns the tokenizer; None, with a warning in the log, if llguidance can't read it. The node serves other calls
    all the same."""
    try:
        return LLTokenizer(str(file), n_vocab=vocab_size, eos_token=sorted(eos_ids))
    except ValueError as error:
        log.warning("structured output is off: llguidance can't read %s", file, extra={"reason": str(error)})
        return None
