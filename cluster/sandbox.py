"""Jinja sandbox for templates of tenants. No text that a template makes holds an address of an object in this process.

Python's text of a function, method or iterator holds its address, and a template can print each value that it gets. So
a template gets only values of known types. Others are wrapped, wherever it gets them: from a name, an attribute, an
item, a call or a filter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from types import NoneType
from typing import Any

from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import Context, LoopContext, Macro, TemplateReference, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace


class PlainCallable:
    """Callable whose text has no address."""

    __slots__ = ("_inner",)

    def __init__(self, inner: Callable[..., Any]) -> None:
        self._inner = inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._inner(*args, **kwargs)

    def __repr__(self) -> str:
        return "<function>"


class PlainIterator:
    """Iterator whose text has no address."""

    __slots__ = ("_inner",)

    def __init__(self, inner: Iterator[Any]) -> None:
        self._inner = inner

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._inner)

    def __repr__(self) -> str:
        return "<iterator>"


class PlainObject:
    """Stands for an object that no template needs."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<object>"


class PlainCycler(Cycler):
    """Jinja's `cycler`, whose text has no address."""

    def __repr__(self) -> str:
        return "<cycler>"


class PlainJoiner(Joiner):
    """Jinja's `joiner`, whose text has no address."""

    def __repr__(self) -> str:
        return "<joiner>"


class PlainDict:
    """Python's `dict` with no other attribute than `fromkeys`."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)

    def __repr__(self) -> str:
        return "<function>"


_CONTAINERS: tuple[type, ...] = (
    list,
    dict,
    tuple,
    set,
    frozenset,
    range,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
)
_OF_JINJA = (Undefined, Macro, LoopContext, Namespace, TemplateReference, PlainCycler, PlainJoiner, PlainDict)
KNOWN = (NoneType, str, int, float, complex, bytes, type, *_CONTAINERS, *_OF_JINJA)
"""Types whose text has no address. The values in a container are those that the template has got before."""
PLAIN = (PlainCallable, PlainIterator, PlainObject)


def plain(value: Any) -> Any:
    """Returns the value if its type is known. Otherwise wraps it, so that its text has no address."""
    if isinstance(value, (KNOWN, PLAIN)):
        return value
    if isinstance(value, Iterator):
        return PlainIterator(value)
    return PlainCallable(value) if callable(value) else PlainObject()


class Sandbox(ImmutableSandboxedEnvironment):
    """Sandbox with trimmed blocks, loop controls, and the given filters, functions and tags in addition to Jinja's."""

    def __init__(
        self,
        filters: Mapping[str, Callable[..., Any]],
        functions: Mapping[str, Callable[..., Any]],
        tags: Sequence[type[Extension]] = (),
    ) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, *tags])
        self.filters = {name: _with_plain_results(each) for name, each in {**self.filters, **filters}.items()}
        by_name = {**self.globals, **functions, "cycler": PlainCycler, "joiner": PlainJoiner}
        self.globals.update({name: plain(value) for name, value in by_name.items()})

    def getattr(self, obj: Any, attribute: str) -> Any:
        return plain(super().getattr(obj, attribute))

    def getitem(self, obj: Any, argument: Any) -> Any:
        return plain(super().getitem(obj, argument))

    # The names can't be those of a template's arguments, which are passed on by name.
    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        return plain(super().call(__context, __obj, *args, **kwargs))


def _with_plain_results(apply: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(apply)  # the copy has Jinja's marks of the arguments that a filter gets
    def applied(*args: Any, **kwargs: Any) -> Any:
        return plain(apply(*args, **kwargs))

    return applied
