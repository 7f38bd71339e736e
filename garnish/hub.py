"""Adapters on the Hugging Face Hub: `hf:org/name`, from the local cache or the Hub, whichever has it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from adapters.peft_config import CONFIG_FILE, MAX_CONFIG_BYTES, WEIGHTS_FILE
from garnish.adapter_folder import what_lies_there
from garnish.errors import GarnishError

HUB = "hf:"
COMMAND = (sys.executable, "-m", "garnish.hub")
MAX_SECONDS = 600.0
"""For both files; the service bounds a deploy by as much."""
_PLACE = re.compile(
    r"hf:(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    r"(?:/(?P<folder>[\w.-]+(?:/[\w.-]+){0,3}))?(?:@(?P<revision>[\w][\w./-]{0,100}))?",
    re.ASCII,
)
MAX_BYTES = {CONFIG_FILE: MAX_CONFIG_BYTES, WEIGHTS_FILE: 512 << 20}
"""The weights': what a gateway takes with a deploy."""
REPLY_SECONDS = 10.0


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


class Refused(Exception):
    """There is no such adapter for this caller; the text says why, and is meant for a person."""


def fetch(place: HubPlace) -> Fetched:
    """Fetches the two files from the Hub, or from the cache when the Hub is not reached. Where the folder lacks one of
    them, returns the names that lie there instead. Raises Refused, and OSError."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        known = HfApi().model_info(
            place.repository, revision=place.revision, files_metadata=True, timeout=REPLY_SECONDS
        )
    except HfHubHTTPError as error:
        raise Refused(_status_problem(error, place)) from None
    except HFValidationError:
        raise Refused(f"{place.repository} is no name that the Hub allows: check it") from None
    except Exception as error:  # whichever library carries the request: the Hub was not reached
        return _cached(place, type(error).__name__)
    prefix = f"{place.folder}/" if place.folder else ""
    sizes = {
        file.rfilename.removeprefix(prefix): file.size or 0
        for file in known.siblings or ()
        if file.rfilename.startswith(prefix)
    }
    if any(name not in sizes for name in MAX_BYTES):
        return Fetched(names=[name for name in sizes if name.count("/") <= 1 and name != ".gitattributes"])
    for name, limit in MAX_BYTES.items():
        if sizes[name] > limit:
            raise Refused(f"{name} has {sizes[name]} bytes; at most {limit} are fetched")
    try:
        return _files(place)
    except HfHubHTTPError as error:
        raise Refused(_status_problem(error, place)) from None
    except LocalEntryNotFoundError:
        raise Refused("the Hugging Face Hub was not reached any more while it was fetched; try again") from None
    except OSError:
        raise
    except Exception as error:  # whichever library carries the files
        raise Refused(f"the download broke off ({type(error).__name__}); try again") from None


def _cached(place: HubPlace, reason: str) -> Fetched:
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return _files(place, local_files_only=True)
    except LocalEntryNotFoundError:
        raise Refused(
            f"it is not in the local cache, and the Hugging Face Hub can't be reached ({reason}); where it is reached: "
            f"hf download {place.repository}"
        ) from None


def _files(place: HubPlace, **options: Any) -> Fetched:
    """Fetches both files, of one commit; with `local_files_only` from the cache. Raises Refused when they are not of
    one commit."""
    from huggingface_hub import hf_hub_download

    folders = {
        Path(
            hf_hub_download(
                place.repository,
                name,
                subfolder=place.folder,
                revision=place.revision,
                etag_timeout=REPLY_SECONDS,
                **options,
            )
        ).parent
        for name in MAX_BYTES
    }
    if len(folders) > 1:
        raise Refused("it was changed while it was fetched; try again")
    return Fetched(folder=str(folders.pop()))


def _status_problem(error: Any, place: HubPlace) -> str:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    page = f"https://huggingface.co/{place.repository}"
    match error:
        case GatedRepoError():
            return f"gated: accept its terms at {page}, and set HF_TOKEN or run `hf auth login`"
        case RevisionNotFoundError():
            return f"the Hub has no revision {place.revision} of it"
        case RepositoryNotFoundError():
            return "the Hub has no such model, or it is private: check the name; for a private one set HF_TOKEN"
        case _:
            status = error.response.status_code
            token = ": the token in HF_TOKEN, or of `hf auth login`, is not valid there" if status in (401, 403) else ""
            return f"the Hub answers {status}{token}"


def main() -> int:
    place = msgspec.json.decode(sys.stdin.buffer.read(), type=HubPlace)
    try:
        found = fetch(place)
    except Refused as error:
        found = Fetched(problem=str(error))
    except OSError as error:
        found = Fetched(problem=f"it can't be kept in the cache ({error.strerror or type(error).__name__})")
    sys.stdout.buffer.write(msgspec.json.encode(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
