"""Triton's interpreter without what it repeats: tests of interpreted kernels spend most of their time in that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest


class _Scope:
    """What a launch undoes at its end."""

    def __init__(self, scope: Any, patched: set[int]) -> None:
        self._scope, self._patched = scope, patched

    def restore(self) -> None:
        self._patched.clear()
        self._scope.restore()


@contextmanager
def patched_once() -> Iterator[None]:
    """Within it the interpreter exchanges the operations of `triton.language` once for each launch. By itself it looks
    through the whole language at each call of a function inside a kernel, of which a program makes a dozen."""
    from triton import language
    from triton.runtime import interpreter

    patch: Callable[[Any], Any] = interpreter._patch_lang
    patched: set[int] = set()
    """Modules whose operations are exchanged until the launch ends."""

    @cache
    def languages(function: Any) -> frozenset[int]:
        """Those that `patch` would look through."""
        known = {id(value) for value in function.__globals__.values()}
        return frozenset(known & {id(language), id(language.core)})

    def once(function: Any) -> _Scope | None:
        if languages(function) <= patched:
            return None  # which only a call inside a kernel gets, and drops
        patched.update(languages(function))
        return _Scope(patch(function), patched)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(interpreter, "_patch_lang", once)
        yield
