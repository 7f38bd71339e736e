"""What every object store must do, run over each kind by the fixture `make_store`."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.errors import Conflict, InvalidRequest, NotFound, PreconditionFailed
from adapters.local_store import LocalStore
from adapters.open_store import open_store
from adapters.store import ObjectStore

MakeStore = Callable[[], ObjectStore]


@pytest.fixture(params=["local"])
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> MakeStore:
    """Makes further clients of one and the same empty store."""
    kinds: dict[str, MakeStore] = {"local": lambda: LocalStore(tmp_path / "store")}
    return kinds[request.param]


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


@settings(max_examples=40, deadline=None)
@given(
    keys=st.sets(st.lists(_segments, min_size=1, max_size=3).map(lambda parts: "/".join([*parts, "END"])), max_size=12),
    prefix=st.text(alphabet="ab-.0/", max_size=3),
    after=st.text(alphabet="ab-.0/E", max_size=5),
    limit=st.integers(1, 5),
)
def test_listing_equals_sorting_all_keys(
    tmp_path_factory: pytest.TempPathFactory, keys: set[str], prefix: str, after: str, limit: int
) -> None:
    store = LocalStore(tmp_path_factory.mktemp("listed"))
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


def test_one_of_many_creators_wins(make_store: MakeStore) -> None:
    start = threading.Barrier(8)

    def create(number: int) -> bool:
        store = make_store()
        start.wait(timeout=30)
        try:
            store.put_if_absent("key", str(number).encode())
        except Conflict:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(create, range(8)))
    assert won.count(True) == 1
    assert make_store().get("key").data == str(won.index(True)).encode()


def test_no_increment_is_lost_between_threads(make_store: MakeStore) -> None:
    make_store().put_if_absent("count", b"0")

    def add(times: int) -> None:
        store = make_store()
        while times:
            found = store.get("count")
            try:
                store.put_if_match("count", str(int(found.data) + 1).encode(), found.etag)
            except PreconditionFailed:
                continue
            times -= 1

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, [10] * 4))
    assert make_store().get("count").data == b"40"


def test_open_store_takes_directories_only(tmp_path: Path) -> None:
    for url in (str(tmp_path / "r"), (tmp_path / "r").as_uri()):
        store = open_store(url)
        assert isinstance(store, LocalStore)
        assert store.root == tmp_path / "r"
    with pytest.raises(InvalidRequest, match="not built yet"):
        open_store("s3://bucket/prefix")
    for url in ("http://host/x", "file://elsewhere/x"):
        with pytest.raises(InvalidRequest, match="expected a directory"):
            open_store(url)


def test_etags_are_those_of_the_content(store: ObjectStore) -> None:
    assert store.put("one", b"same") == store.put("two", b"same") == store.get("one").etag
    assert len({store.put("one", data) for data in (b"", b"a", b"b")}) == 3
    assert hashlib.sha256(b"b").hexdigest() == store.get("one").etag


_KEYS = ("a", "b/a", "b/b", "b-/a")
_operations = st.tuples(
    st.sampled_from(["put", "absent", "match", "stale", "delete"]), st.sampled_from(_KEYS), st.binary(max_size=2)
)


@settings(max_examples=60, deadline=None)
@given(operations=st.lists(_operations, max_size=12))
def test_a_store_is_a_dictionary_with_conditions(
    tmp_path_factory: pytest.TempPathFactory, operations: list[tuple[str, str, bytes]]
) -> None:
    store, model = LocalStore(tmp_path_factory.mktemp("modelled")), dict[str, bytes]()
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
