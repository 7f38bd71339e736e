"""Downloads adapters `hf:org/name` from the Hugging Face Hub, or takes them from the local cache.

The download runs in a child process, `python -m garnish.hub`. It reads a HubPlace from standard input and writes a
Fetched to standard output. Only the adapter's two files are downloaded, after a check of their sizes. The token is
chosen by the library huggingface_hub: HF_TOKEN, or the one stored by `hf auth login`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from adapters.peft_config import CONFIG_FILE, MAX_CONFIG_BYTES, TEXT_FILES, WEIGHTS_FILE
from garnish.adapter_folder import describe_other_files
from garnish.errors import GarnishError

HUB = "hf:"
COMMAND = (sys.executable, "-m", "garnish.hub")
MAX_SECONDS = 600.0
"""Timeout in seconds for the download of both files, equal to the service's timeout for a deploy."""
_PLACE = re.compile(
    r"hf:(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    r"(?:/(?P<folder>[\w.-]+(?:/[\w.-]+){0,3}))?(?:@(?P<revision>[\w][\w./-]{0,100}))?",
    re.ASCII,
)
MAX_BYTES = {CONFIG_FILE: MAX_CONFIG_BYTES, WEIGHTS_FILE: 512 << 20}
"""Maximum bytes by file. The limit for the weights is that of the gateway for a deploy."""
REPLY_SECONDS = 10.0


class HubPlace(msgspec.Struct, frozen=True):
    repository: str
    folder: str | None = None
    revision: str | None = None


class Fetched(msgspec.Struct, frozen=True):
    """Result of the download of an adapter; exactly one field is set.

    `folder` is the adapter's folder in the local cache. `problem` is the reason why the download failed. `names` are
    the files in the repository (or in the folder that was named), if the adapter's config or weights file is missing
    there.
    """

    folder: str | None = None
    problem: str | None = None
    names: list[str] | None = None


def is_hub_place(adapter: str | Path) -> bool:
    return isinstance(adapter, str) and adapter.startswith(HUB)


def local_folder(adapter: str | Path, use: str) -> Path:
    """Returns the directory of `adapter`; an adapter on the Hub is first downloaded into the cache.

    `use` is as in `adapter_files`. Raises GarnishError if the Hub has no such adapter, or if neither the Hub nor the
    cache can be read within MAX_SECONDS.
    """
    if not isinstance(adapter, str) or not adapter.startswith(HUB):
        return Path(adapter)
    place = parse_place(adapter)
    fetched = _download(place, adapter)
    if fetched.names is not None:
        raise GarnishError("invalid_request", _other_files(fetched.names, place, adapter, use))
    if fetched.folder is None:
        raise GarnishError("invalid_request", f"{adapter}: {fetched.problem}")
    return Path(fetched.folder)


def parse_place(written: str) -> HubPlace:
    """Returns the repository, folder and revision that `hf:org/name` refers to. Raises GarnishError."""
    match = _PLACE.fullmatch(written)
    if match is None or ".." in written:
        raise GarnishError(
            "invalid_request", f"{written[:200]}: expected hf:org/name, hf:org/name/folder or hf:org/name@revision"
        )
    return HubPlace(**match.groupdict())


def _other_files(names: list[str], place: HubPlace, written: str, use: str) -> str:
    """Returns one line about a repository that lacks one or both files: what it contains, and what to do.

    Commands in that line operate on a local copy of the repository.
    """
    if CONFIG_FILE not in names:
        return describe_other_files(names, written.partition("@")[0], use)
    copy = place.repository.partition("/")[2]
    problem = describe_other_files(names, f"{copy}/{place.folder}" if place.folder else copy, use)
    return f"{written}: {problem} (after: hf download {place.repository} --local-dir {copy})"


def _download(place: HubPlace, written: str) -> Fetched:
    """Downloads the adapter in a child process, and returns the result.

    A child process is used since the library has a timeout for each read but not for the complete download, and since
    its progress bars must not reach the terminal. Raises GarnishError after MAX_SECONDS, or if the child writes no
    result.
    """
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
    """The adapter can't be downloaded; the message has the reason."""


def fetch(place: HubPlace) -> Fetched:
    """Downloads the two files from the Hub, or takes them from the cache if the Hub can't be reached.

    If the repository's folder lacks one of the two files, the result has the names of its files instead. Raises Refused
    and OSError.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        info = HfApi().model_info(place.repository, revision=place.revision, files_metadata=True, timeout=REPLY_SECONDS)
    except HfHubHTTPError as error:
        raise Refused(_status_problem(error, place)) from None
    except HFValidationError:
        raise Refused(f"{place.repository} is not a valid name on the Hub: check it") from None
    except Exception as error:  # the HTTP library may raise anything: the Hub was not reached
        return _cached(place, type(error).__name__)
    prefix = f"{place.folder}/" if place.folder else ""
    sizes = {
        file.rfilename.removeprefix(prefix): file.size or 0
        for file in info.siblings or ()
        if file.rfilename.startswith(prefix)
    }
    if any(name not in sizes for name in MAX_BYTES):
        return Fetched(names=[name for name in sizes if name.count("/") <= 1 and name != ".gitattributes"])
    for name, limit in MAX_BYTES.items():
        if sizes[name] > limit:
            raise Refused(f"{name} has {sizes[name]} bytes; at most {limit} are fetched")
    optional = [name for name, limit in TEXT_FILES.items() if name in sizes and sizes[name] <= limit]
    try:
        return _files(place, optional)
    except HfHubHTTPError as error:
        raise Refused(_status_problem(error, place)) from None
    except LocalEntryNotFoundError:
        raise Refused("the connection to the Hugging Face Hub was lost during the download; try again") from None
    except OSError:
        raise
    except Exception as error:  # the HTTP library may raise anything
        raise Refused(f"the download broke off ({type(error).__name__}); try again") from None


def _cached(place: HubPlace, reason: str) -> Fetched:
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return _files(place, [], local_files_only=True)
    except LocalEntryNotFoundError:
        raise Refused(
            f"it is not in the local cache, and the Hugging Face Hub can't be reached ({reason}); where it is reached: "
            f"hf download {place.repository}"
        ) from None


def _files(place: HubPlace, optional: Sequence[str], **options: Any) -> Fetched:
    """Downloads both files and the `optional` ones; with `local_files_only` it takes them from the cache.

    Raises Refused if they belong to different commits.
    """
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
        for name in (*MAX_BYTES, *optional)
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
        fetched = fetch(place)
    except Refused as error:
        fetched = Fetched(problem=str(error))
    except OSError as error:
        fetched = Fetched(problem=f"it can't be kept in the cache ({error.strerror or type(error).__name__})")
    sys.stdout.buffer.write(msgspec.json.encode(fetched))
    return 0


if __name__ == "__main__":
    sys.exit(main())
