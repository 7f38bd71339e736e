"""The cluster secret: a random string in a 0600 file. Gateway and nodes share it, and check it on every call."""

from __future__ import annotations

import hmac
import os
import secrets
import tempfile
from pathlib import Path


class SecretError(ValueError):
    """The secret file is missing, readable by others, empty or too short."""


def create_secret(path: Path) -> str:
    """Creates the file (mode 0600) with a new secret, or reads the existing one. Returns the secret. Safe when several
    processes call it at once. Raises SecretError as `read_secret` does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    secret = secrets.token_urlsafe(32)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".secret-")  # mkstemp makes it 0600
    try:
        with os.fdopen(descriptor, "w") as stream:
            stream.write(secret + "\n")
        os.link(temporary, path)  # fails when another process was first; a reader never sees half a file
    except FileExistsError:
        return read_secret(path)
    finally:
        os.unlink(temporary)
    return secret


def read_secret(path: Path) -> str:
    """Returns the file's secret. Raises SecretError when the file is missing, readable by others or too short."""
    try:
        mode = path.stat().st_mode & 0o777
        secret = path.read_text().strip()
    except OSError as error:
        raise SecretError(f"cluster secret {path}: {error.strerror}") from error
    if mode & 0o077:
        raise SecretError(f"cluster secret {path} is readable by others (mode {mode:o}); run: chmod 600 {path}")
    if len(secret) < 32:
        raise SecretError(f"cluster secret {path} is empty or shorter than 32 characters; delete it to make a new one")
    return secret


def authorization(secret: str) -> dict[str, str]:
    """Returns the Authorization header that carries the secret."""
    return {"authorization": f"Bearer {secret}"}


def is_authorized(header: str | None, secret: str) -> bool:
    """Returns whether an Authorization header carries the secret, compared in constant time."""
    presented = (header or "").removeprefix("Bearer ")
    return hmac.compare_digest(presented.encode(), secret.encode())
