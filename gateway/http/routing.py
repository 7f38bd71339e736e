"""Routes that match exactly the paths that they name."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.routing import Route


class ExactRoute(Route):
    """Starlette's own lets a path end in one newline more, and drops it from a parameter of type `path`: a malformed
    name would count as the one without it."""

    def __init__(self, path: str, endpoint: Callable[..., Awaitable[Any]], *, methods: list[str]) -> None:
        super().__init__(path, endpoint, methods=methods)
        pattern = self.path_regex.pattern
        assert pattern.endswith("$")
        self.path_regex = re.compile(pattern.removesuffix("$") + r"\Z", re.DOTALL)
