"""A second try for `ast.parse`, whose conversion before CPython 3.11.8 and 3.12.2 can be disturbed by another one."""

from __future__ import annotations

import ast
import functools
from typing import Any

TRIES = 3
_parse = ast.parse


@functools.wraps(_parse)
def parse_again(*arguments: Any, **named: Any) -> Any:
    """The tree of a source; parsed up to TRIES times where the interpreter loses count of its depth.

    The count is one for all threads of a process (python/cpython#106905): a traceback that another thread, or a
    collected task, prints in the middle of a conversion makes this one end in a SystemError although its tree is right.
    """
    for _ in range(TRIES - 1):
        try:
            return _parse(*arguments, **named)
        except SystemError as error:
            if "recursion depth mismatch" not in str(error):
                raise
    return _parse(*arguments, **named)
