"""Manifests made by a gateway's host: stored where it can make them, left to a node where it can't."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from adapters.base_manifest import find_manifest
from adapters.base_model import fingerprint
from adapters.local_store import LocalStore
from garnish.base_manifests import ensure_manifest, try_manifest
from garnish.config import load_service_file
from garnish.errors import StartError
from garnish.settings import gateway_config, resolve_base
from tests.support.foreign_bases import write_foreign_base


def service_of(folder: Path, **node: object) -> Path:
    file = folder / "serverless.yml"
    file.write_text(json.dumps({"service": "s", "base_model": str(folder / "phi3"), "node": node}))
    return file


@pytest.fixture
def model(tmp_path: Path, stories_dir: Path) -> Path:
    return write_foreign_base("phi3", tmp_path / "phi3", stories_dir)


def test_a_host_without_the_interpreter_leaves_it_to_a_node(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    service = load_service_file(service_of(tmp_path, engine="vllm", vllm={"python": "/nowhere/python"}))
    base = resolve_base(service)
    with pytest.raises(StartError, match=r"node\.vllm\.python: /nowhere/python can't be run"):
        ensure_manifest(service, base, tmp_path / "state")
    with caplog.at_level(logging.WARNING):
        try_manifest(service, base, tmp_path / "state")
    assert "/nowhere/python can't be run: No such file or directory; a node will send the manifest" in caplog.text
    assert gateway_config(service, base, tmp_path / "state").waits_for_base


def test_a_host_that_can_make_it_stores_it(model: Path, tmp_path: Path) -> None:
    service = load_service_file(service_of(tmp_path, engine="vllm"))
    try_manifest(service, resolve_base(service), tmp_path / "state")
    stored = find_manifest(LocalStore(tmp_path / "state" / "registry"), fingerprint(model))
    assert stored is not None and stored.id == "phi3"


def test_our_own_engine_waits_for_no_node(model: Path, tmp_path: Path) -> None:
    service = load_service_file(service_of(tmp_path))
    base = resolve_base(service)
    with pytest.raises(StartError, match=r"node\.engine: vllm"):
        try_manifest(service, base, tmp_path / "state")
    assert not gateway_config(service, base, tmp_path / "state").waits_for_base
