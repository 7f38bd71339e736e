"""Makes and stores the manifests of base models that only vLLM serves."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import msgspec

from adapters import base_manifest
from adapters.base_manifest import MANIFEST_VERSION, BaseManifest, InspectedBase, base_from_manifest
from adapters.base_model import OtherFamily, UnsupportedBase, fingerprint, load_base_model
from adapters.errors import AdapterError, CorruptRecord
from adapters.open_store import open_checked_store
from adapters.store import ObjectStore
from garnish.config import ServiceFile
from garnish.errors import StartError
from garnish.settings import Base, registry_of, vllm_config

INSPECT_SECONDS = 600.0
"""Maximum seconds for reading a base's modules. Importing torch and transformers takes nearly all of the time."""
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja",
)  # fmt: skip
ROOT = Path(__file__).parents[1]


def make_manifest(base: Base, python: str = "") -> BaseManifest:
    """Returns the manifest of a base model, made by a process of `python` (empty: this one's interpreter), which has
    torch and transformers.

    Raises StartError.
    """
    directory = base.directory.absolute()
    command = [python or sys.executable, "-m", "node_agent.base_inspection", str(directory)]
    environment = dict(os.environ) | ({"PYTHONPATH": str(ROOT)} if python else {})
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=INSPECT_SECONDS, check=False)
    except OSError as error:
        raise StartError(f"node.vllm.python: {command[0]} can't be run: {error.strerror or error}") from None
    except subprocess.TimeoutExpired:
        raise StartError(f"base_model: its modules were not read within {INSPECT_SECONDS:g} s") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else "no reason was given"
        raise StartError(f"base_model: {command[0]} can't read the modules of {directory}: {reason}")
    tokenizer = {
        name: hashlib.sha256((directory / name).read_bytes()).hexdigest()
        for name in TOKENIZER_FILES
        if (directory / name).is_file()
    }
    try:
        return BaseManifest(
            version=MANIFEST_VERSION,
            id=base.id,
            fingerprint=fingerprint(directory),
            tokenizer=tokenizer,
            chat_template="chat_template.jinja" in tokenizer or _has_template(directory / "tokenizer_config.json"),
            base=msgspec.json.decode(done.stdout, type=InspectedBase),
        )
    except (UnsupportedBase, msgspec.DecodeError) as error:
        raise StartError(f"base_model: {error}") from None


def ensure_manifest(service: ServiceFile, base: Base, state: Path) -> None:
    """Makes and stores the manifest of the service's base model, if only vLLM serves it and none is stored. Raises
    StartError."""
    try:
        load_base_model(base.directory, base.id)
        return
    except OtherFamily as error:
        if service.node.engine != "vllm":
            raise StartError(f"base_model: {error}") from None
    except UnsupportedBase as error:
        raise StartError(f"base_model: {error}") from None
    try:
        store = open_checked_store(registry_of(service, state))
        manifest = _stored(store, fingerprint(base.directory))
        if manifest is None:
            manifest = make_manifest(base, vllm_config(service).python)
            base_manifest.store_manifest(store, manifest)
        base_from_manifest(manifest, base.id)
    except (AdapterError, UnsupportedBase) as error:
        raise StartError(f"base_model: {error}") from None


def _stored(store: ObjectStore, base_fingerprint: str) -> BaseManifest | None:
    """Returns the stored manifest; None if there is none, or if it is damaged and must be made again."""
    try:
        return base_manifest.find_manifest(store, base_fingerprint)
    except CorruptRecord:
        return None


def _has_template(file: Path) -> bool:
    try:
        return bool(msgspec.json.decode(file.read_bytes()).get("chat_template"))
    except (OSError, msgspec.DecodeError, AttributeError):
        return False
