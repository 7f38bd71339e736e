"""Several processes move aliases of one function at once, in a directory and in a bucket."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from adapters.base_model import BaseModel
from adapters.functions import FunctionRecord, VersionEntry, with_version
from adapters.records import update_record
from adapters.registry import Registry
from adapters.standing import function_key
from adapters.store import ObjectStore

WRITERS = 3
CHANGES = 8
VERSIONS = 10

MOVERS = """
import json, multiprocessing, sys
from adapters.errors import PreconditionFailed
from adapters.function_changes import FunctionChanges
from adapters.functions import FunctionRecord
from adapters.open_store import open_store
from adapters.records import read_record
from adapters.standing import function_key

url, writers, changes, conditional = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "True"
if url.startswith("s3:"):
    import adapters.s3_store  # once, for all of them
fork = multiprocessing.get_context("fork")
start = fork.Barrier(writers)

def move(number):
    store, acknowledged = open_store(url), []
    moves = FunctionChanges(store)
    start.wait(60)
    for step in range(changes):
        # Shares that no other writer sets, so that each change can be told in the history.
        share = (1 + number * changes + step) / 1000
        weights = {"1": 1 - share, str(2 + step % 9): share}
        while True:
            record, _ = read_record(store, function_key("acme", "f"), FunctionRecord)
            matches = {record.generation} if conditional else None
            try:
                after = moves.set_alias("acme", "f", "prod", weights, matches)
            except PreconditionFailed:
                continue
            if conditional:
                assert after.generation == record.generation + 1
            acknowledged.append([after.generation, weights])
            break
    return acknowledged

with fork.Pool(writers) as pool:  # a process for each
    print(json.dumps(pool.map(move, range(writers), 1)))
"""


def function_with_versions(registry: Registry) -> None:
    for version in range(1, VERSIONS + 1):
        entry = VersionEntry(version, f"{version:064}", registry.base.fingerprint, (4,), ("q",), 10, 0.0, 2)

        def commit(record: FunctionRecord | None, entry: VersionEntry = entry) -> FunctionRecord:
            return with_version(record or FunctionRecord(name="f", created=0.0), entry, "latest", 0.0)

        update_record(registry.store, function_key("acme", "f"), FunctionRecord, commit)


@pytest.mark.parametrize("conditional", [False, True], ids=["any", "if-match"])
def test_each_acknowledged_change_is_in_the_history(
    url: str, open_again: Callable[[str], ObjectStore], base: BaseModel, conditional: bool
) -> None:
    registry = Registry(open_again(url), base)
    function_with_versions(registry)
    began = registry.function("acme", "f").generation
    command = [sys.executable, "-c", MOVERS, url, str(WRITERS), str(CHANGES), str(conditional)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    acknowledged = [change for changes in json.loads(done.stdout) for change in changes]
    record = registry.function("acme", "f")
    alias = record.aliases["prod"]
    seen = [past.weights for past in alias.history] + [alias.weights]
    assert len(acknowledged) == WRITERS * CHANGES == len(seen)
    # Each has a generation of its own, and stands in the history at its place.
    assert sorted(acknowledged) == [[began + 1 + index, weights] for index, weights in enumerate(seen)]
    assert (record.generation, alias.generation) == (began + len(seen), len(seen))
