"""Files of tenants in a store that fails."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from adapters.errors import StoreUnavailable
from adapters.local_store import LocalStore
from gateway.batches.files import FileRecord, FileStore


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
    file_id = files.begin("acme")
    part = files.put_part("acme", file_id, "0", b"x")
    with pytest.raises(StoreUnavailable):
        files.commit("acme", FileRecord(file_id, "calls", "batch", time.time(), (part,)))
    store.failing = False
    files.abandon("acme", file_id)
    assert not store.list("data/")
