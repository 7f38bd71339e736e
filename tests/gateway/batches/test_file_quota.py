"""How many bytes of files a tenant may have, whoever uploads at once, dies half-way, or writes late."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from math import inf
from pathlib import Path
from typing import Any

import msgspec
import pytest

from adapters.errors import Conflict, NotFound, StoreUnavailable
from adapters.local_store import LocalStore
from gateway.batches import file_quota
from gateway.batches.file_quota import RECOUNT_SECONDS, FileSizes
from gateway.batches.files import ABANDONED_SECONDS, FileRecord, FileStore, new_id

LIMIT = 1000
KEY = "data/acme/file_sizes.json"


class Store(LocalStore):
    """Does `left` writes more; its clock is `ahead`. `listed`: prefixes of listings."""

    left, ahead = inf, 0.0

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.listed: list[str] = []

    def now(self) -> float:
        return super().now() + self.ahead

    def list(self, prefix: str, after: str = "", limit: int = 1000) -> Any:
        self.listed.append(prefix)
        return super().list(prefix, after, limit)

    def put(self, key: str, data: bytes | Path) -> str:
        self._count()
        return super().put(key, data)

    def put_if_absent(self, key: str, data: bytes | Path) -> str:
        self._count()
        return super().put_if_absent(key, data)

    def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        self._count()
        return super().put_if_match(key, data, etag)

    def delete(self, key: str) -> None:
        self._count()
        super().delete(key)

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise StoreUnavailable("the gateway was killed")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "registry")


@pytest.fixture
def files(store: Store) -> FileStore:
    return FileStore(store)


def upload(files: FileStore, size: int, limit: int = LIMIT, stated: int | None = None) -> str:
    """`stated`: bytes of the request, with what its form adds."""
    file_id = files.begin("acme", size if stated is None else stated, limit)
    parts = (files.put_part("acme", file_id, "0", b"x" * size),)
    files.commit("acme", FileRecord(file_id, "calls", "batch", time.time(), parts))
    return file_id


def noted(store: Store) -> dict[str, int]:
    return msgspec.json.decode(store.get(KEY).data, type=FileSizes).files


def there(files: FileStore) -> int:
    return sum(record.bytes for record in files.records("acme", files.ids("acme")))


def test_uploads_at_once_stay_within_the_limit_together(store: Store) -> None:
    """Each by a gateway of its own."""

    def one(_: int) -> bool:
        try:
            upload(FileStore(store), 100)
        except Conflict:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(one, range(25))) == 10
    assert there(FileStore(store)) == 1000 == sum(noted(store).values())


def test_an_upload_that_has_ended_takes_what_it_has(store: Store, files: FileStore) -> None:
    upload(files, 900, stated=1000)
    upload(files, 100)
    with pytest.raises(Conflict, match="may have 1000 bytes of files, and with 1 more has 1001; delete some first"):
        upload(files, 1)


def test_what_is_deleted_or_refused_takes_no_room(store: Store, files: FileStore) -> None:
    first = upload(files, 600)
    with pytest.raises(Conflict):
        upload(files, 500)
    assert not store.list("data/acme/uploads/")
    half = files.begin("acme", 400, LIMIT)
    files.abandon("acme", half)
    files.delete("acme", first)
    assert noted(store) == {}
    upload(files, LIMIT)


def test_the_number_of_files_is_bounded_too(store: Store, files: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_quota, "MAX_FILES", 2)
    first = upload(files, 1)
    upload(files, 1)
    with pytest.raises(Conflict, match="may have 2 files"):
        upload(files, 1)
    files.delete("acme", first)
    upload(files, 1)


def test_an_upload_whose_gateway_was_killed_gives_its_room_back(store: Store, files: FileStore) -> None:
    file_id = files.begin("acme", 800, LIMIT)
    files.put_part("acme", file_id, "0", b"x" * 500)
    with pytest.raises(Conflict):
        upload(files, 300)
    store.ahead = ABANDONED_SECONDS + 1
    upload(files, 300)
    assert list(noted(store).values()) == [300]


def test_no_upload_lists_the_files(store: Store, files: FileStore) -> None:
    upload(files, 10)
    store.listed.clear()
    files.delete("acme", upload(files, 10))
    assert not any(prefix.endswith("/files/") for prefix in store.listed)


def test_outputs_of_batches_count_but_are_not_refused(store: Store, files: FileStore) -> None:
    upload(files, 900)
    files.quota.check("acme", LIMIT)
    output = new_id("file-", time.time())
    parts = (files.put_part("acme", output, "0", b"x" * 200),)
    files.commit("acme", FileRecord(output, "output", "batch_output", time.time(), parts))
    for work in (lambda: files.quota.check("acme", LIMIT), lambda: upload(files, 1)):
        with pytest.raises(Conflict, match="may have 1000 bytes"):
            work()
    files.delete("acme", output)
    files.quota.check("acme", LIMIT)


def test_records_that_were_written_too_late_count(store: Store, files: FileStore) -> None:
    """The store commits them after their uploads were abandoned, before the first other upload and beside it."""

    def written_late(size: int) -> str:
        record = FileRecord(new_id("file-", time.time()), "calls", "batch", time.time())
        parts = (files.put_part("acme", record.id, "0", b"x" * size),)
        store.put(
            f"data/acme/files/{record.id}.json", msgspec.json.encode(msgspec.structs.replace(record, parts=parts))
        )
        return record.id

    first = written_late(700)
    with pytest.raises(Conflict):
        upload(files, 400)
    upload(files, 200)
    written_late(300)
    upload(files, 50)  # not known yet
    store.ahead = RECOUNT_SECONDS + 1
    with pytest.raises(Conflict, match="with 1 more has 1251"):
        upload(files, 1)
    store.delete(f"data/acme/files/{first}.json")
    upload(files, 400)


def test_a_damaged_record_is_made_anew(store: Store, files: FileStore) -> None:
    upload(files, 900)
    store.put(KEY, b"{")
    with pytest.raises(Conflict):
        upload(files, 200)
    store.put("data/acme/files/file-broken.json", b"{")
    store.put(KEY, b"{")
    upload(files, 100)
    assert sorted(noted(store).values()) == [100, 900]


@pytest.mark.parametrize("seed", range(6))
def test_however_gateways_die_no_fewer_bytes_are_noted_than_there_are(store: Store, seed: int) -> None:
    """And just as many once what they have left is removed."""
    rng = random.Random(seed)
    refused = died = 0
    for _ in range(60):
        files, store.left = FileStore(store), rng.choice([inf, rng.randrange(9)])
        try:
            if rng.random() < 0.6:
                size = rng.randint(1, 400)
                upload(files, size, stated=size + rng.randint(0, 50))
            else:
                files.delete("acme", rng.choice(files.ids("acme") or ["file-none"]))
        except StoreUnavailable:
            died += 1
        except Conflict:
            refused += 1
        except NotFound:
            pass
        store.left = inf
        assert not store.head(KEY) or there(files) <= sum(noted(store).values()) <= LIMIT
    assert refused and died
    store.ahead = ABANDONED_SECONDS + 1
    files.delete("acme", upload(files, 1, limit=10 * LIMIT))
    assert there(files) <= sum(noted(store).values()) <= there(files) + 50 * len(noted(store))
    assert noted(store).keys() == set(files.ids("acme"))
    assert not store.list("data/acme/uploads/")
