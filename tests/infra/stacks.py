"""Stacks of local pools for tests, and whether terraform is there."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from infra.stack import LocalHost, Pool, Stack

needs_terraform = pytest.mark.skipif(
    not (shutil.which("terraform") or shutil.which("tofu")),
    reason="neither terraform nor tofu is on PATH: what plans and applies node pools is NOT tested",
)

NOTER = Path(__file__).with_name("noting_program.py")


def pool(name: str = "here", desired: int = 1, **fields: object) -> Pool:
    given = {"backend": "local", "min": 0, "max": 3, **fields}
    return Pool(name=name, desired=desired, **given)  # type: ignore[arg-type]


def stack(*pools: Pool, state: str = "/srv/state", revision: str = "1", **fields: object) -> Stack:
    """Its program is `noting_program.py`, which writes below the state directory what it was told."""
    host = LocalHost(
        program=(sys.executable, str(NOTER)),
        service_file="/srv/serverless.yml",
        state=state,
        gateway_url="http://127.0.0.1:8080",
        secret_file="/srv/state/cluster.secret",
        registry="/srv/state/registry",
        revision=revision,
    )
    return Stack(service="demo", pools=pools or (pool(),), local=host, **fields)  # type: ignore[arg-type]
