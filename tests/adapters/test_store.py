"""What every object store must do, run over each kind by the fixtures `new_url` and `new_store`."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters import local_store, s3_store
from adapters.errors import Conflict, InvalidRequest, NotFound, PreconditionFailed
from adapters.local_store import LocalStore
from adapters.open_store import open_store
from adapters.store import ObjectStore

MakeStore = Callable[[], ObjectStore]


@pytest.fixture
def store(make_store: MakeStore) -> ObjectStore:
    return make_store()


def test_a_written_object_is_read_whole_and_in_ranges(store: ObjectStore, make_store: MakeStore) -> None:
    etag = store.put_if_absent("a/b", b"0123456789")
    other = make_store()
    assert other.get("a/b").data == b"0123456789"
    assert other.get("a/b").etag == etag
    assert [other.get_range("a/b", 2, 3), other.get_range("a/b", 8, 9), other.get_range("a/b", 10, 1)] == [
        b"234",
        b"89",
        b"",
    ]
    for start, length, expected in ((2, 3, b"234"), (8, 9, b"89"), (10, 1, b"")):
        buffer = bytearray(length)
        assert other.get_range_into("a/b", start, memoryview(buffer)) == len(expected)
        assert bytes(buffer[: len(expected)]) == expected
    info = other.head("a/b")
    assert info is not None
    assert (info.key, info.size) == ("a/b", 10)
    assert abs(info.modified - time.time()) < 3600  # in the right unit and time zone


def test_ranges_are_read_into_the_callers_memory(store: ObjectStore) -> None:
    store.put("a/b", b"0123456789")
    store.put("empty", b"")
    memory = bytearray(b"........")
    assert store.get_range_into("a/b", 2, memoryview(memory)[1:4]) == 3
    assert memory == b".234...."
    assert store.get_range_into("a/b", 8, memoryview(memory)) == 2
    assert memory == b"8934...."
    numbers = np.zeros(2, dtype="<u2")
    assert store.get_range_into("a/b", 0, memoryview(numbers)) == 4
    assert numbers.tobytes() == b"0123"
    assert store.get_range_into("a/b", 10, memoryview(memory)) == 0
    assert store.get_range_into("a/b", 99, memoryview(memory)) == 0
    assert store.get_range_into("a/b", 3, memoryview(bytearray())) == 0
    assert (store.get_range_into("empty", 0, memoryview(memory)), store.get_range("empty", 0, 5)) == (0, b"")
    assert store.get_range("a/b", 3, 0) == b""
    assert memory == b"8934...."
    for size in (0, 4):
        with pytest.raises(NotFound):
            store.get_range_into("no/such", 0, memoryview(bytearray(size)))


@given(st.binary(max_size=40), st.integers(0, 50), st.integers(0, 50))
def test_ranges_equal_slices(new_store: MakeStore, data: bytes, start: int, length: int) -> None:
    store = new_store()
    store.put("key", data)
    assert store.get_range("key", start, length) == data[start : start + length]
    memory = bytearray(length)
    assert store.get_range_into("key", start, memoryview(memory)) == len(data[start : start + length])
    assert memory.startswith(data[start : start + length])


def test_large_objects(store: ObjectStore, tmp_path: Path) -> None:
    """Larger than what S3 gets and gives in one piece; lengths around the borders of pieces."""
    data, file = os.urandom((20 << 20) + 7), tmp_path / "file"
    file.write_bytes(data)
    etag = store.put_if_absent("a/blob", file)
    with pytest.raises(Conflict):
        store.put_if_absent("a/blob", file)
    assert store.put("a/blob", data) == etag
    piece = 8 << 20
    for start, length in ((0, len(data)), (1, piece), (1, piece + 1), (5, 2 * piece), (piece, 3 * piece), (3, 1)):
        assert store.get_range("a/blob", start, length) == data[start : start + length]
    memory = np.zeros(len(data) + 3, dtype=np.uint8)
    assert store.get_range_into("a/blob", 2, memoryview(memory)) == len(data) - 2
    assert memory.tobytes() == data[2:] + bytes(5)


@pytest.mark.parametrize("length", [0, 1, 300_000, (8 << 20) + 5])
def test_what_has_come_is_told_as_it_comes(store: ObjectStore, length: int) -> None:
    data, seen = os.urandom(length + 4), list[int]()
    store.put("a/b", data)
    memory = bytearray(length + 9)

    def arrived(count: int) -> None:
        seen.append(count)
        assert memory[:count] == data[3 : 3 + count]

    assert store.get_range_into("a/b", 3, memoryview(memory), arrived) == length + 1 == seen[-1]
    assert seen == sorted(seen)


def test_a_reader_ends_its_read(store: ObjectStore) -> None:
    class Enough(Exception):
        pass

    def arrived(count: int) -> None:
        raise Enough

    data = os.urandom(1 << 20)
    store.put("a/b", data)
    for _ in range(40):  # more than a client has connections
        with pytest.raises(Enough):
            store.get_range_into("a/b", 0, memoryview(bytearray(1 << 20)), arrived)
    assert store.get("a/b").data == data


def test_more_keys_than_one_page_holds(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (local_store, s3_store):
        monkeypatch.setattr(module, "MAX_LIST", 100)
    keys = [f"f/{number:04}/{part}" for number in range(52) for part in "ab"]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda key: store.put(key, b""), keys))
    first = store.list("f/")
    assert [info.key for info in first] == keys[:100]
    assert [info.key for info in store.list("f/", after=keys[99])] == keys[100:]
    assert [info.key for info in store.list("f/", limit=5000)] == keys[:100]
    assert list(store.folders("f/")) == [f"{number:04}" for number in range(52)]
    assert list(store.folders("f/", after="0047", limit=3)) == ["0048", "0049", "0050"]


def test_a_file_is_stored_like_bytes(store: ObjectStore, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(os.urandom(3_000_000))
    etag = store.put_if_absent("blob", file)
    assert store.get("blob").data == file.read_bytes()
    assert etag == store.get("blob").etag
    assert file.exists()


def test_what_does_not_exist_is_not_found(store: ObjectStore) -> None:
    assert store.head("no/such") is None
    with pytest.raises(NotFound):
        store.get("no/such")
    with pytest.raises(NotFound):
        store.get_range("no/such", 0, 1)
    store.delete("no/such")
    store.put_if_absent("no/such/object", b"")
    assert store.head("no/such") is None
    with pytest.raises(NotFound):
        store.get("no/such")


def test_conditions_are_kept(store: ObjectStore) -> None:
    first = store.put_if_absent("key", b"1")
    with pytest.raises(Conflict):
        store.put_if_absent("key", b"2")
    second = store.put_if_match("key", b"2", first)
    assert second != first
    with pytest.raises(PreconditionFailed):
        store.put_if_match("key", b"3", first)
    assert store.get("key").data == b"2"
    store.delete("key")
    with pytest.raises(PreconditionFailed):
        store.put_if_match("key", b"3", second)
    assert store.head("key") is None
    store.put("key", b"4")
    store.put("key", b"5")
    assert store.get("key").data == b"5"


@pytest.mark.parametrize(
    "key",
    [
        *("", "/", "/a", "a/", "a//b", "..", "a/../b", ".", "a/.", ".tmp/x", ".locks/00"),
        *("a\0b", "a b", "ä", "a\\b", "a/\n", "x" * 300, "/".join(["x" * 200] * 6)),
    ],
)
def test_keys_that_could_leave_the_store_are_refused(store: ObjectStore, key: str) -> None:
    calls: list[Callable[[], object]] = [
        lambda: store.get(key),
        lambda: store.head(key),
        lambda: store.get_range(key, 0, 1),
        lambda: store.put(key, b""),
        lambda: store.put_if_absent(key, b""),
        lambda: store.put_if_match(key, b"", "x"),
        lambda: store.delete(key),
    ]
    for call in calls:
        with pytest.raises(InvalidRequest):
            call()


_segments = st.text(alphabet="ab-._0", min_size=1, max_size=3).filter(lambda text: text[0] not in ".")


@given(
    keys=st.sets(st.lists(_segments, min_size=1, max_size=3).map(lambda parts: "/".join([*parts, "END"])), max_size=12),
    prefix=st.text(alphabet="ab-.0/", max_size=3),
    after=st.text(alphabet="ab-.0/E", max_size=5),
    limit=st.integers(1, 5),
)
def test_listing_equals_sorting_all_keys(
    new_store: MakeStore, keys: set[str], prefix: str, after: str, limit: int
) -> None:
    store = new_store()
    for key in keys:
        store.put_if_absent(key, b"")
    expected = sorted(key for key in keys if key.startswith(prefix) and key > after)
    assert [info.key for info in store.list(prefix, after, limit)] == expected[:limit]


def test_folders_are_listed_in_pages(store: ObjectStore) -> None:
    for name in ("b", "a", "a-b", "a.b", "c"):
        store.put_if_absent(f"f/{name}/x.json", b"")
    store.put_if_absent("f/file", b"")
    store.put_if_absent("f/gone/x.json", b"")
    store.delete("f/gone/x.json")
    names = ["a-b", "a.b", "a", "b", "c"]  # the order of "name/"
    assert list(store.folders("f/")) == names
    assert list(store.folders("f/", after="a.b", limit=2)) == ["a", "b"]
    assert list(store.folders("nothing/")) == []


def test_addresses_of_directories(tmp_path: Path) -> None:
    for url in (str(tmp_path / "r"), (tmp_path / "r").as_uri()):
        store = open_store(url)
        assert isinstance(store, LocalStore)
        assert store.root == tmp_path / "r"
    for url in ("http://host/x", "file://elsewhere/x"):
        with pytest.raises(InvalidRequest, match="expected a directory"):
            open_store(url)


def test_etags_are_those_of_the_content(store: ObjectStore) -> None:
    assert store.put("one", b"same") == store.put("two", b"same") == store.get("one").etag
    assert len({store.put("one", data) for data in (b"", b"a", b"b")}) == 3
    algorithm = hashlib.sha256 if isinstance(store, LocalStore) else hashlib.md5
    assert algorithm(b"b").hexdigest() == store.get("one").etag


_KEYS = ("a", "b/a", "b/b", "b-/a")
_operations = st.tuples(
    st.sampled_from(["put", "absent", "match", "stale", "delete"]), st.sampled_from(_KEYS), st.binary(max_size=2)
)


@given(operations=st.lists(_operations, max_size=12))
def test_a_store_is_a_dictionary_with_conditions(
    new_store: MakeStore, operations: list[tuple[str, str, bytes]]
) -> None:
    store, model = new_store(), dict[str, bytes]()
    for operation, key, data in operations:
        if operation == "put":
            store.put(key, data)
            model[key] = data
        elif operation == "delete":
            store.delete(key)
            model.pop(key, None)
        elif operation == "absent":
            if key in model:
                with pytest.raises(Conflict):
                    store.put_if_absent(key, data)
            else:
                store.put_if_absent(key, data)
                model[key] = data
        elif operation == "match" and key in model:
            store.put_if_match(key, data, store.get(key).etag)
            model[key] = data
        else:
            with pytest.raises(PreconditionFailed):
                store.put_if_match(key, data, "stale")
        assert {info.key: store.get(info.key).data for info in store.list("")} == model
        assert [info.key for info in store.list("")] == sorted(model)
        assert list(store.folders("")) == sorted({k.split("/")[0] for k in model if "/" in k}, key=lambda n: n + "/")
