"""Files of tenants in a store that fails."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from adapters.errors import StoreUnavailable
from adapters.local_store import LocalStore
from gateway.batches.files import ABANDONED_SECONDS, FileRecord, FileStore


class NoDeletes(LocalStore):
    """Deletes nothing while `failing`."""

    failing = True

    def delete(self, key: str) -> None:
        if self.failing:
            raise StoreUnavailable("cut off")
        super().delete(key)


def test_nothing_is_left_of_an_upload_whose_commit_failed_half_way(tmp_path: Path) -> None:
    store = NoDeletes(tmp_path / "registry")
    files = FileStore(store)
    file_id = files.begin("acme", 1, 1)
    part = files.put_part("acme", file_id, "0", b"x")
    with pytest.raises(StoreUnavailable):
        files.commit("acme", FileRecord(file_id, "calls", "batch", time.time(), (part,)))
    store.failing = False
    files.abandon("acme", file_id)
    files.quota.forget("acme")
    assert not store.list("data/")


class FewDeletes(LocalStore):
    """Deletes nothing once `left` are done; its clock is `ahead`."""

    left, ahead = 1, 0.0

    def now(self) -> float:
        return super().now() + self.ahead

    def delete(self, key: str) -> None:
        if self.left <= 0:
            raise StoreUnavailable("cut off")
        self.left -= 1
        super().delete(key)


def test_what_a_removal_that_died_has_left_is_removed_by_the_next_upload(tmp_path: Path) -> None:
    store = FewDeletes(tmp_path / "registry")
    files = FileStore(store)
    file_id = files.begin("acme", 3, 9)
    parts = tuple(files.put_part("acme", file_id, str(number), b"x") for number in range(3))
    files.commit("acme", FileRecord(file_id, "calls", "batch", time.time(), parts))
    store.left = 2  # the record, and one part of it
    with pytest.raises(StoreUnavailable):
        files.delete("acme", file_id)
    assert files.ids("acme") == []
    store.left, store.ahead = 100, ABANDONED_SECONDS + 1
    files.begin("acme", 1, 1)
    assert not store.list(f"data/acme/parts/{file_id}/")
