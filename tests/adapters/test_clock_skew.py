"""Hosts whose clocks are hours away from the store's: ages and deadlines in the registry are by the store's clock."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from adapters.base_model import BaseModel
from adapters.collect import ORPHAN_SECONDS, Collected, collect
from adapters.contents import REWRITE_SECONDS
from adapters.deployment import AdapterUpload
from adapters.errors import Conflict, StoreUnavailable
from adapters.local_store import LocalStore
from adapters.quota import Quota
from adapters.quota_usage import HOLD_SECONDS
from adapters.registry import Registry
from adapters.s3_calls import S3Limits
from adapters.s3_store import S3Store
from adapters.s3_url import S3Place
from adapters.store import ObjectStore
from adapters.tenants import Limits, Tenants
from tests.support.s3_proxy import Fault, Proxy

KEY = "blobs/sha256/" + "ab" * 32


@pytest.fixture
def skewed(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """skewed(seconds): from now on this process's clock is so much ahead of the others'; the store's files and server
    keep their own."""
    real = time.time

    def set_ahead(seconds: float) -> None:
        monkeypatch.setattr(time, "time", lambda: real() + seconds)

    return set_ahead


@pytest.mark.parametrize("ahead", [-2 * ORPHAN_SECONDS, 2 * ORPHAN_SECONDS])
def test_the_stores_clock_is_its_own(
    new_store: Callable[[], ObjectStore], skewed: Callable[[float], None], ahead: float
) -> None:
    store, before = new_store(), time.time()
    skewed(ahead)
    store.put("key", b"1")
    info = store.head("key")
    assert info is not None
    assert abs(store.now() - before) < 60 and abs(store.now() - info.modified) < 60


def test_collecting_on_a_host_that_is_days_ahead_removes_nothing_young(
    new_store: Callable[[], ObjectStore], skewed: Callable[[float], None]
) -> None:
    store = new_store()
    store.put(KEY, b"of a deploy under way")
    skewed(2 * ORPHAN_SECONDS)
    assert collect(store) == Collected(dry_run=False, kept=1)
    assert store.head(KEY) is not None


def test_a_gateway_that_is_hours_behind_writes_old_content_anew(
    tmp_path: Path, base: BaseModel, good: tuple[bytes, Path], skewed: Callable[[float], None]
) -> None:
    """Else it would list what is about to be collected."""
    store = LocalStore(tmp_path)
    registry = Registry(store, base)
    registry.deploy("acme", "f", AdapterUpload(*good))
    registry.delete_function("acme", "f")
    contents = [info.key for prefix in ("blobs/", "artifacts/") for info in store.list(prefix)]
    then = time.time() - ORPHAN_SECONDS
    for key in contents:
        os.utime(tmp_path / key, (then, then))
    skewed(-ORPHAN_SECONDS)
    registry.deploy("acme", "g", AdapterUpload(*good))
    infos = [store.head(key) for key in contents]
    assert all(info is not None and info.modified > then + REWRITE_SECONDS for info in infos)


@pytest.mark.parametrize("ahead", [-2 * HOLD_SECONDS, 2 * HOLD_SECONDS])
def test_room_that_a_deploy_holds_is_not_taken_by_one_with_another_clock(
    tmp_path: Path, skewed: Callable[[float], None], ahead: float
) -> None:
    store = LocalStore(tmp_path)
    Tenants(store).put("acme", limits=Limits(adapters=1))
    skewed(ahead)
    hold = Quota(store).take("acme", "f", 10)
    assert hold is not None
    skewed(0.0)
    with pytest.raises(Conflict):
        Quota(store).take("acme", "f", 10)
    Quota(store).settle("acme", hold, None)
    assert Quota(store).take("acme", "f", 10) is not None


def test_removals_are_remembered_by_the_stores_clock(
    tmp_path: Path, base: BaseModel, good: tuple[bytes, Path], skewed: Callable[[float], None]
) -> None:
    registry = Registry(LocalStore(tmp_path), base)
    registry.deploy("acme", "f", AdapterUpload(*good))
    before = time.time()
    skewed(-2 * ORPHAN_SECONDS)
    registry.delete_function("acme", "f")
    record = msgspec.json.decode((tmp_path / "tenants/acme/functions/f/function.json").read_bytes())
    assert abs(record["removed"]["1"] - before) < 60


def test_s3_tells_that_this_hosts_clock_is_wrong(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Proxy(s3_endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
        store = S3Store(S3Place("garnish-tests"), S3Limits(connect=2.0, read=1.0, call=6.0, attempts=2))
        proxy.faults.append(Fault("refuse", status=403, code="RequestTimeTooSkewed", times=100))
        for call in (lambda: store.get("key"), store.now):
            with pytest.raises(StoreUnavailable, match="set this host's clock"):
                call()
