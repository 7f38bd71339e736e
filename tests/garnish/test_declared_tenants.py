"""The tenants of serverless.yml as the registry gets them at each start."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from adapters.errors import Conflict, NotFound
from adapters.local_store import LocalStore
from adapters.slo import Slo
from adapters.tenants import FILE_BYTES, Limits, Tenants
from garnish.config import ServiceFile, load_service_file
from garnish.up.prepare import make_keys

URL = "http://127.0.0.1:8080"


def service(folder: Path, text: str) -> ServiceFile:
    file = folder / "serverless.yml"
    file.write_text(f"service: s\nbase_model: m\nregistry: ./registry\n{text}")
    return load_service_file(file, {})


def test_the_file_decides(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    make_keys(
        service(
            tmp_path,
            "tenants: {a: {limits: {adapters: 5}, weight: 2, slo: {class: strict}, webhook_hosts: [a.example]}, "
            "b: {limits: {bytes: 1KiB}, file_bytes: 2KiB}}\n",
        ),
        state,
        URL,
    )
    tenants = Tenants(LocalStore(tmp_path / "registry"))
    assert (tenants.get("a").limits, tenants.get("b").limits) == (Limits(adapters=5), Limits(bytes=1024))
    assert (tenants.get("a").slo, tenants.get("a").weight) == (Slo(slo_class="strict"), 2.0)
    assert (tenants.get("a").webhook_hosts, tenants.get("b").webhook_hosts) == (("a.example",), ())
    assert (tenants.get("a").file_bytes, tenants.get("b").file_bytes) == (FILE_BYTES, 2048)
    for name in ("a", "b"):
        with pytest.raises(Conflict):
            tenants.replace(name, Limits())
    credentials, made = make_keys(service(tmp_path, "tenants: {a: {}}\n"), state, URL)
    assert (made, list(credentials.keys)) == ({}, ["a"])
    assert tenants.get("a").limits == Limits()
    assert (tenants.get("a").slo, tenants.get("a").weight, tenants.get("a").webhook_hosts) == (Slo(), 1.0, ())
    assert not tenants.get("b").declared
    assert tenants.get("b").limits == Limits(bytes=1024), "what is no longer declared stays as it was"
    tenants.delete("b")


def test_another_registry(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    make_keys(service(tmp_path, "tenants: {a: , b: }\n"), state, URL)
    make_keys(msgspec.structs.replace(service(tmp_path, "tenants: {a: }\n"), registry="./elsewhere"), state, URL)
    tenants = Tenants(LocalStore(tmp_path / "elsewhere"))
    assert [tenant.id for tenant in tenants.list()] == ["a"]
    with pytest.raises(NotFound):
        tenants.get("b")


def test_without_keys(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    make_keys(service(tmp_path, "auth: none\ntenants: {a: {limits: {concurrent: 2}}}\n"), state, URL)
    tenants = Tenants(LocalStore(tmp_path / "registry"))
    assert [(tenant.id, tenant.limits.concurrent) for tenant in tenants.list()] == [("a", 2), ("default", None)]
