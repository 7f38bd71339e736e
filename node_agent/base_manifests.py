"""Makes the manifest of a base model that only vLLM serves, and sends it to the gateway, which stores it.

A node may only read the registry. It makes the manifest in the environment that has vLLM.
"""

from __future__ import annotations

import hashlib
import http.client
import logging
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import msgspec

from adapters.base_manifest import MANIFEST_VERSION, TOKENIZER_FILES, BaseManifest, InspectedBase
from adapters.base_model import fingerprint
from cluster.messages import BASE_PATH
from cluster.secret import authorization

INSPECT_SECONDS = 600.0
"""Maximum seconds for reading a base's modules. Importing torch and transformers takes nearly all of the time."""
SEND_SECONDS = 600.0
"""Maximum seconds for which a node tries to send a manifest."""
POST_SECONDS = 30.0
PAUSE_S = 1.0
"""Seconds between two attempts."""
ROOT = Path(__file__).parents[1]

log = logging.getLogger("garnish.engine")


class NotMade(ValueError):
    """The manifest can't be made, or the gateway does not take it."""


def make_manifest(directory: Path, base_id: str, python: str = "") -> BaseManifest:
    """Returns the manifest of the base model in `directory`, made by a process of `python` (empty: this one's
    interpreter), which has torch and transformers.

    Raises NotMade, or UnsupportedBase if the weight files are missing.
    """
    directory = directory.absolute()
    command = [python or sys.executable, "-m", "node_agent.base_inspection", str(directory)]
    environment = dict(os.environ) | ({"PYTHONPATH": str(ROOT)} if python else {})
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=INSPECT_SECONDS, check=False)
    except OSError as error:
        raise NotMade(f"node.vllm.python: {command[0]} can't be run: {error.strerror or error}") from None
    except subprocess.TimeoutExpired:
        raise NotMade(f"base_model: its modules were not read within {INSPECT_SECONDS:g} s") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else "no reason was given"
        raise NotMade(f"base_model: {command[0]} can't read the modules of {directory}: {reason}")
    tokenizer = {
        name: hashlib.sha256((directory / name).read_bytes()).hexdigest()
        for name in TOKENIZER_FILES
        if (directory / name).is_file()
    }
    try:
        return BaseManifest(
            version=MANIFEST_VERSION,
            id=base_id,
            fingerprint=fingerprint(directory),
            tokenizer=tokenizer,
            chat_template="chat_template.jinja" in tokenizer or _has_template(directory / "tokenizer_config.json"),
            base=msgspec.json.decode(done.stdout, type=InspectedBase),
        )
    except msgspec.DecodeError as error:
        raise NotMade(f"base_model: {error}") from None


def send_manifest(manifest: BaseManifest, gateway_url: str, secret: str, seconds: float = SEND_SECONDS) -> None:
    """Sends a manifest to the gateway until it is stored. Raises NotMade if the gateway refuses it, and TimeoutError if
    it is not stored within `seconds`. The operator states the URL."""
    url = gateway_url.rstrip("/") + BASE_PATH
    headers = {**authorization(secret), "content-type": "application/json"}
    request = urllib.request.Request(url, msgspec.json.encode(manifest), headers, method="POST")  # noqa: S310
    deadline, problem = time.monotonic() + seconds, ""
    while True:
        before, problem = problem, _post(request)
        if not problem:
            log.info("the gateway has stored the base model's manifest", extra={"fingerprint": manifest.fingerprint})
            return
        if problem != before:
            log.warning("the gateway has not stored the base model's manifest yet", extra={"reason": problem})
        if time.monotonic() + PAUSE_S > deadline:
            raise TimeoutError(f"the base model's manifest was not stored within {seconds:g} s: {problem}")
        time.sleep(PAUSE_S)


def _post(request: urllib.request.Request) -> str:
    """Returns why the manifest is not stored yet; empty if it is. Raises NotMade if it never will be."""
    try:
        with urllib.request.urlopen(request, timeout=POST_SECONDS):  # noqa: S310
            return ""
    except urllib.error.HTTPError as error:
        reason = f"the gateway answered {error.code}: {error.read(2000).decode(errors='replace')}"
        if error.code in (http.client.TOO_MANY_REQUESTS, http.client.CONFLICT) or error.code >= 500:
            return reason
        raise NotMade(f"base_model: its manifest is refused: {reason}") from None
    except (OSError, http.client.HTTPException) as error:
        return f"{type(error).__name__}: {error}"


def _has_template(file: Path) -> bool:
    try:
        return bool(msgspec.json.decode(file.read_bytes()).get("chat_template"))
    except (OSError, msgspec.DecodeError, AttributeError):
        return False
