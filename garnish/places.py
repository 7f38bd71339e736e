"""Distinguishes paths on this host from addresses, some of which look like paths, such as `s3:/bucket`."""

from __future__ import annotations

import re

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")


def path_problem(written: str) -> str:
    """Returns why a text is no path of a directory on this host; empty if it is one."""
    if not _ADDRESS.match(written):
        return ""
    return f"{written[:200]!r} begins like an address (a path may begin with ./): expected a directory's path"
