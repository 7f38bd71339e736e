"""Finds the two files of a PEFT adapter in a folder.

If the folder lacks them, the module describes in one line what the folder contains instead.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import shlex
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import msgspec

from adapters.peft_config import CONFIG_FILE, TEXT_FILES, WEIGHTS_FILE
from adapters.wrong_files import LFS_POINTER, PICKLE_FILE, POINTER_PROBLEM
from garnish.errors import GarnishError
from garnish.places import path_problem

MAX_ENTRIES = 1000
MAX_SHOWN = 5

CONVERT = (
    "import sys, torch; from safetensors.torch import save_file; f = sys.argv[1] + '/adapter_model'; "
    "save_file({k: v.clone().contiguous() for k, v in "
    "torch.load(f + '.bin', map_location='cpu', weights_only=True).items()}, f + '.safetensors')"
)
"""Python code that converts a folder's pickle file to safetensors.

`weights_only` ensures that no code from the pickle runs.
"""

_CHECKPOINT = re.compile(r"checkpoint-([0-9]{1,12})", re.ASCII)
_ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.zst")
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


class AdapterFiles(msgspec.Struct, frozen=True):
    """Paths of an adapter's config and weights files, both of which exist."""

    config: Path
    weights: Path

    def text_files(self) -> dict[str, bytes]:
        """Returns the tokenizer's files that are next to the adapter, by name. Those that are too large are left out.
        Raises OSError."""
        files = {name: self.config.parent / name for name in TEXT_FILES}
        return {
            name: file.read_bytes()
            for name, file in files.items()
            if file.is_file() and file.stat().st_size <= TEXT_FILES[name] and not _begins_as_pointer(file)
        }

    def sha256(self) -> tuple[str, str]:
        """Returns the SHA-256 hashes of both files. Raises GarnishError if a file can't be read."""
        return _sha256(self.config), _sha256(self.weights)


def adapter_files(folder: Path, use: str) -> AdapterFiles:
    """Returns the paths of the folder's two files. Only the beginnings of the files are read.

    `use` is a command with `{}` in place of the folder, such as `garnish deploy mine {}`. Error messages use it to
    suggest the command for another folder. Raises GarnishError with one line that says what the folder contains and
    what to do.
    """
    files = AdapterFiles(folder / CONFIG_FILE, folder / WEIGHTS_FILE)
    try:
        if not folder.is_dir():
            raise _problem(_no_folder(folder, use))
        if not (files.config.is_file() and files.weights.is_file()):
            raise _problem(describe_other_files(list(_entries(folder)), str(folder), use))
        for file in (files.config, files.weights):
            if _begins_as_pointer(file):
                raise _problem(f"{file} is {POINTER_PROBLEM}")
    except OSError as error:
        raise _problem(f"{folder} can't be read: {error.strerror}") from None
    return files


def describe_other_files(names: list[str], where: str, use: str) -> str:
    """Returns one line about a folder that lacks one or both files: what the folder contains, and what to do.

    `names` are relative paths of the folder's files, at most one folder deep. `where` is the folder's name in the line.
    `use` is as in `adapter_files`.
    """
    top = [name for name in names if "/" not in name]
    below = sorted({name.partition("/")[0] for name in names if name.endswith(f"/{CONFIG_FILE}")})
    checkpoints = sorted((int(match[1]), name) for name in below if (match := _CHECKPOINT.fullmatch(name)))
    if not names:
        return f"{where} is empty: expected {CONFIG_FILE} and {WEIGHTS_FILE}"
    if CONFIG_FILE in top:
        return f"{where} {_without_weights(top, where)}"
    if checkpoints:
        newest = _use_line(use, f"{where}/{checkpoints[-1][1]}")
        return (
            f"{where} holds no adapter itself, only {_format_count(len(checkpoints), 'checkpoint')}; "
            f"the newest: {newest}"
        )
    if below:
        first = _use_line(use, f"{where}/{below[0]}")
        return f"{where} holds no adapter itself, but folders that do ({_format_names(below)}); name one: {first}"
    if "config.json" in top and any(name.endswith((".safetensors", ".bin")) for name in top):
        return (
            f"{where} holds a whole model (config.json and its weights), not an adapter: serve it as base_model, or "
            "deploy the adapter that was merged into it"
        )
    if any(name.endswith(".gguf") for name in top):
        return f"{where} holds a GGUF file, llama.cpp's: deploy the PEFT adapter that it was converted from"
    if WEIGHTS_FILE in top or PICKLE_FILE in top:
        return f"{where} lacks {CONFIG_FILE}: PEFT's save_pretrained writes it next to the weights, copy it there"
    return (
        f"{where} holds no adapter: expected {CONFIG_FILE} and {WEIGHTS_FILE}, "
        f"found {_format_names(sorted(top or names))}"
    )


def _without_weights(top: list[str], where: str) -> str:
    """Returns the line about a folder with a config but no weights: what it contains, and what to do."""
    if PICKLE_FILE in top:
        convert = f"python -c {shlex.quote(CONVERT)} {shlex.quote(where)}"
        return (
            f"holds {PICKLE_FILE}, a pickle, which is never read, for it could run code; "
            f"to convert it, where torch and safetensors are installed: {convert}"
        )
    other_files = sorted(name for name in top if name.endswith(".safetensors"))
    if len(other_files) == 1:
        source, target = (shlex.quote(f"{where}/{name}") for name in (other_files[0], WEIGHTS_FILE))
        return f"holds no {WEIGHTS_FILE} but {other_files[0]}; if that is the adapter: mv {source} {target}"
    if any(name.endswith(".gguf") for name in top):
        return "holds a GGUF file, llama.cpp's, and no weights of PEFT: deploy the adapter that it was converted from"
    listed = f"; found {_format_names(other_files)}" if other_files else ""
    return f"holds {CONFIG_FILE} but no {WEIGHTS_FILE}: save the adapter with PEFT's save_pretrained{listed}"


def _no_folder(path: Path, use: str) -> str:
    """Returns the line about a path that is not a folder: what the path is, and what to do."""
    if path.is_file():
        if (path.parent / CONFIG_FILE).is_file():
            return f"{path} is a file of an adapter: name its folder: {_use_line(use, str(path.parent))}"
        if path.name.endswith(".gguf"):
            return f"{path} is a GGUF file, llama.cpp's: deploy the PEFT adapter that it was converted from"
        if path.name.endswith(_ARCHIVES):
            return f"{path} is an archive: unpack it, and name the folder"
        if path.name.endswith(_PICKLES):
            return f"{path} is a pickle by its name, which is never read: name a folder that PEFT saved"
        return f"{path} is a file: expected a folder with {CONFIG_FILE} and {WEIGHTS_FILE}"
    if problem := path_problem(str(path)):
        return f"{problem}, hf:org/name or s3://bucket/prefix"
    near = difflib.get_close_matches(path.name, _siblings(path), 1)
    if near:
        return f"{path}: there is no such folder; did you mean {path.with_name(near[0])}?"
    parts = path.parts
    hub = f"; one on the Hugging Face Hub is named hf:{path}" if len(parts) == 2 and not path.is_absolute() else ""
    return f"{path}: there is no such folder{hub}"


def _siblings(path: Path) -> list[str]:
    try:
        with os.scandir(path.parent) as entries:
            return [entry.name for entry in islice(entries, MAX_ENTRIES) if entry.is_dir()]
    except OSError:
        return []


def _entries(folder: Path) -> Iterator[str]:
    """Yields the names of at most MAX_ENTRIES entries of the folder.

    A subfolder with an adapter is yielded as `name/adapter_config.json`, any other subfolder as `name/`.
    """
    with os.scandir(folder) as entries:
        for entry in islice(entries, MAX_ENTRIES):
            if not entry.is_dir():
                yield entry.name
            elif os.path.isfile(os.path.join(entry.path, CONFIG_FILE)):
                yield f"{entry.name}/{CONFIG_FILE}"
            else:
                yield f"{entry.name}/"


def _begins_as_pointer(file: Path) -> bool:
    with file.open("rb") as stream:
        return stream.read(len(LFS_POINTER)) == LFS_POINTER


def _format_names(names: Iterable[str]) -> str:
    shown_names = list(names)
    more = f" and {len(shown_names) - MAX_SHOWN} more" if len(shown_names) > MAX_SHOWN else ""
    return ", ".join(shown_names[:MAX_SHOWN]) + more


def _use_line(use: str, folder: str) -> str:
    return use.replace("{}", shlex.quote(folder))


def _format_count(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _sha256(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise _problem(f"{file} can't be read: {error.strerror}") from None


def _problem(text: str) -> GarnishError:
    return GarnishError("invalid_request", text)
