"""A collection that is stopped between its last look at an object and its removal, while a deploy writes it again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from adapters import contents, s3_removal
from adapters.base_model import BaseModel
from adapters.collect import ORPHAN_SECONDS, collect
from adapters.deployment import AdapterUpload
from adapters.errors import StoreUnavailable
from adapters.local_store import LocalStore
from adapters.registry import Registry
from adapters.s3_store import S3Store
from adapters.store import ObjectStore, all_objects
from adapters.verify import verify

Good = tuple[bytes, Path]
Open = Callable[[str], ObjectStore]
KINDS = ["blobs/", "artifacts/", "tenants/acme/functions/f/versions/"]
STORES = len(KINDS) + 2
"""One for each test."""
S3_TICK, DISK_TICK = 1.0, 0.001
"""By which a store's times differ: S3 tells them in whole seconds, and disks by the kernel's ticks."""


class Orphans(NamedTuple):
    """Stores with what a function left that was deleted."""

    urls: list[str]
    now: float
    """By which all of that is old, and what comes after is not."""


@pytest.fixture(scope="module")
def orphans(new_url: Callable[[], str], open_again: Open, base: BaseModel, good: Good) -> Orphans:
    urls = [new_url() for _ in range(STORES)]
    stores = [open_again(url) for url in urls]
    for store in stores:
        Registry(store, base).deploy("acme", "f", AdapterUpload(*good))
        store.delete("tenants/acme/functions/f/function.json")  # as a deploy leaves it that died before its end
    last = max(info.modified for store in stores for info in all_objects(store, ""))
    now = last + (S3_TICK if isinstance(stores[0], S3Store) else DISK_TICK)
    while stores[-1].now() < now:
        time.sleep(0.02)
        stores[-1].list("", limit=1)  # the answer says what time it is
    return Orphans(urls, now + ORPHAN_SECONDS)


@pytest.fixture
def now(orphans: Orphans) -> float:
    return orphans.now


@pytest.fixture
def url(orphans: Orphans, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of a store that no other test uses."""
    monkeypatch.setattr(contents, "REWRITE_SECONDS", 0.0)  # all that a deploy meets is old, and written anew
    return orphans.urls.pop()


class Stop:
    """Holds up removals of keys that begin with `prefix`, from the moment in which nothing but the removal is left."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, store: ObjectStore, prefix: str) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        if isinstance(store, S3Store):
            remove = store.delete

            def delete(key: str) -> None:
                self._wait(key.startswith(prefix))
                remove(key)

            monkeypatch.setattr(store, "delete", delete)
        else:
            assert isinstance(store, LocalStore)
            unlink, root = Path.unlink, store.root

            def unlinked(path: Path, missing_ok: bool = False) -> None:
                self._wait(str(path).startswith(str(root / prefix)))
                unlink(path, missing_ok)

            monkeypatch.setattr(Path, "unlink", unlinked)

    def _wait(self, mine: bool) -> None:
        if mine:
            self.reached.set()
            assert self.go_on.wait(60)


class Deploying:
    """A deploy of `f` in a thread of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, registry: Registry, good: Good) -> None:
        self._halted, sleep = threading.Event(), time.sleep
        pool = ThreadPoolExecutor(1, "deploying")

        def noted(seconds: float) -> None:
            if threading.current_thread().name.startswith("deploying"):
                self._halted.set()
            sleep(seconds)

        monkeypatch.setattr(time, "sleep", noted)
        self.future = pool.submit(registry.deploy, "acme", "f", AdapterUpload(*good))
        self.future.add_done_callback(lambda _: self._halted.set())
        pool.shutdown(wait=False)

    def await_halt(self) -> None:
        """Until it has ended, or waits for someone else: for a lock, or for a removal that is under way."""
        assert self._halted.wait(60)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_deploy_writes_meanwhile_is_there_in_the_end(
    url: str, open_again: Open, now: float, base: BaseModel, good: Good, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept = open_again(url)
    stop = Stop(monkeypatch, swept, kind)
    registry = Registry(open_again(url), base)
    with ThreadPoolExecutor(1) as pool:
        sweep = pool.submit(collect, swept, now=now)
        assert stop.reached.wait(60)
        deploying = Deploying(monkeypatch, registry, good)
        deploying.await_halt()
        stop.go_on.set()
        deploy = deploying.future
        assert deploy.result().created
        sweep.result()
    assert verify(registry.store).damaged == 0
    assert registry.resolve("acme", "f").digest == deploy.result().digest
    assert not registry.store.list(s3_removal.FOLDER)


def test_two_collections_and_a_deploy(
    url: str, open_again: Open, now: float, base: BaseModel, good: Good, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The object is gone by the second when the deploy makes it new, and the first still has to remove it."""
    first = open_again(url)
    stop = Stop(monkeypatch, first, "blobs/")
    registry = Registry(open_again(url), base)
    with ThreadPoolExecutor(1) as pool:
        sweep = pool.submit(collect, first, now=now)
        assert stop.reached.wait(60)
        if isinstance(registry.store, S3Store):
            collect(registry.store, now=now)
        deploying = Deploying(monkeypatch, registry, good)
        deploying.await_halt()
        stop.go_on.set()
        deploying.future.result()
        sweep.result()
    assert verify(registry.store).damaged == 0


def test_a_collection_that_died_holds_up_a_deploy_for_a_while(
    url: str, open_again: Open, now: float, base: BaseModel, good: Good, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_again(url)
    if not isinstance(store, S3Store):
        pytest.skip("a directory's locks end with their process")
    remove = store.delete

    def lost(key: str) -> None:
        if key.startswith("blobs/"):
            raise StoreUnavailable("no answer")
        remove(key)

    monkeypatch.setattr(store, "delete", lost)
    with pytest.raises(StoreUnavailable):
        collect(store, now=now)
    assert len(store.list(s3_removal.FOLDER)) == 1, "the removal may still take effect"
    registry, waited = Registry(open_again(url), base), list[float]()
    time_of_s3 = registry.store.now
    monkeypatch.setattr(registry.store, "now", lambda: time_of_s3() + sum(waited))
    monkeypatch.setattr(time, "sleep", lambda _: waited.append(s3_removal.MARK_SECONDS / 3))
    registry.deploy("acme", "f", AdapterUpload(*good))
    assert waited, "what is there when the deploy begins may still be removed"
    assert verify(registry.store).damaged == 0
    assert not registry.store.list(s3_removal.FOLDER)
