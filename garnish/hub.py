"""Adapters on the Hugging Face Hub: `hf:org/name`, from the local cache or the Hub, whichever has it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec

from garnish.adapter_folder import CONFIG_FILE, what_lies_there
from garnish.errors import GarnishError

HUB = "hf:"
COMMAND = (sys.executable, "-m", "garnish.hub_download")
MAX_SECONDS = 600.0
"""For both files; the service bounds a deploy by as much."""
_PLACE = re.compile(
    r"hf:(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    r"(?:/(?P<folder>[\w.-]+(?:/[\w.-]+){0,3}))?(?:@(?P<revision>[\w][\w./-]{0,100}))?",
    re.ASCII,
)


class HubPlace(msgspec.Struct, frozen=True):
    repository: str
    folder: str | None = None
    """Within the repository."""
    revision: str | None = None
    """Branch, tag or commit; None: main."""


class Fetched(msgspec.Struct, frozen=True):
    """What the downloading process found: the folder in the cache, or a problem, or the names that lie there."""

    folder: str | None = None
    problem: str | None = None
    names: list[str] | None = None


def is_hub_place(adapter: str | Path) -> bool:
    return isinstance(adapter, str) and adapter.startswith(HUB)


def local_folder(adapter: str | Path, use: str) -> Path:
    """Returns the directory that `adapter` names; one on the Hub is fetched into the cache first. `use`: as in
    adapter_files.

    Raises GarnishError when the Hub has no such adapter, or neither it nor the cache can be read within MAX_SECONDS.
    """
    if not isinstance(adapter, str) or not adapter.startswith(HUB):
        return Path(adapter)
    place = parse_place(adapter)
    found = _download(place, adapter)
    if found.names is not None:
        raise GarnishError("invalid_request", _other_files(found.names, place, adapter, use))
    if found.folder is None:
        raise GarnishError("invalid_request", f"{adapter}: {found.problem}")
    return Path(found.folder)


def parse_place(written: str) -> HubPlace:
    """Returns the place on the Hugging Face Hub that `hf:org/name` names. Raises GarnishError."""
    match = _PLACE.fullmatch(written)
    if match is None or ".." in written:
        raise GarnishError(
            "invalid_request", f"{written[:200]}: expected hf:org/name, hf:org/name/folder or hf:org/name@revision"
        )
    return HubPlace(**match.groupdict())


def _other_files(names: list[str], place: HubPlace, written: str, use: str) -> str:
    """Returns one line about a repository without the two files. What is to be done with the files there is done with a
    copy of them."""
    if CONFIG_FILE not in names:
        return what_lies_there(names, written.partition("@")[0], use)
    copy = place.repository.partition("/")[2]
    told = what_lies_there(names, f"{copy}/{place.folder}" if place.folder else copy, use)
    return f"{written}: {told} (after: hf download {place.repository} --local-dir {copy})"


def _download(place: HubPlace, written: str) -> Fetched:
    """Fetches the adapter in a child process: the library bounds each read but not the whole, and its progress bars are
    kept off the terminal. Raises GarnishError when it takes longer than MAX_SECONDS, or gives no answer."""
    environment = {**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    try:
        done = subprocess.run(
            COMMAND,
            input=msgspec.json.encode(place),
            capture_output=True,
            env=environment,
            timeout=MAX_SECONDS,
            check=False,
        )
        return msgspec.json.decode(done.stdout, type=Fetched)
    except subprocess.TimeoutExpired:
        raise GarnishError("unreachable", f"{written}: not fetched within {MAX_SECONDS:.0f} s") from None
    except msgspec.DecodeError:
        raise GarnishError("internal", f"{written}: the download ended with code {done.returncode}") from None
