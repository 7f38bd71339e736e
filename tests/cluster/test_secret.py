from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.secret import SecretError, authorization, create_secret, is_authorized, read_secret


def test_created_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "secret"
    first = create_secret(path)
    assert create_secret(path) == read_secret(path) == first
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["secret"]


def test_processes_agree(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    code = (
        f"from pathlib import Path; from cluster.secret import create_secret; print(create_secret(Path({str(path)!r})))"
    )
    children = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    outputs = {child.communicate(timeout=60)[0] for child in children}
    assert len(outputs) == 1


def test_secrets_that_can_not_be_trusted(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    with pytest.raises(SecretError, match="No such file"):
        read_secret(path)
    path.write_text("x" * 40)
    path.chmod(0o644)
    with pytest.raises(SecretError, match="chmod 600"):
        read_secret(path)
    path.chmod(0o600)
    assert read_secret(path) == "x" * 40
    path.write_text("short")
    with pytest.raises(SecretError, match="shorter"):
        read_secret(path)


def test_authorization() -> None:
    secret = "s" * 40
    assert is_authorized(authorization(secret)["authorization"], secret)
    for header in (None, "", "Bearer ", "Bearer wrong", f"Bearer {secret}x", "Bearer é"):
        assert not is_authorized(header, secret)
