"""Several processes move aliases of one function at once, in a directory and in a bucket."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from adapters.base_model import BaseModel
from adapters.functions import FunctionRecord, VersionEntry, with_version
from adapters.open_store import open_store
from adapters.records import update_record
from adapters.registry import Registry
from adapters.standing import function_key

WRITERS = 3
CHANGES = 8
VERSIONS = 10

MOVER = """
import json, sys
from adapters.errors import PreconditionFailed
from adapters.function_changes import FunctionChanges
from adapters.open_store import open_store
from adapters.records import read_record
from adapters.functions import FunctionRecord
from adapters.standing import function_key

url, number, changes, conditional = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "True"
store = open_store(url)
moves = FunctionChanges(store)
print("ready", flush=True)
sys.stdin.readline()
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
        print(json.dumps([after.generation, weights]), flush=True)
        break
"""


@contextmanager
def movers(url: str, conditional: bool) -> Iterator[list[subprocess.Popen[str]]]:
    with ExitStack() as stack:
        made = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", MOVER, url, str(number), str(CHANGES), str(conditional)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for number in range(WRITERS)
        ]
        try:
            yield made
        finally:
            for process in made:
                process.kill()


def function_with_versions(registry: Registry) -> None:
    for version in range(1, VERSIONS + 1):
        entry = VersionEntry(version, f"{version:064}", registry.base.fingerprint, (4,), ("q",), 10, 0.0)

        def commit(record: FunctionRecord | None, entry: VersionEntry = entry) -> FunctionRecord:
            return with_version(record or FunctionRecord(name="f", created=0.0), entry, "latest", 0.0)

        update_record(registry.store, function_key("acme", "f"), FunctionRecord, commit)


@pytest.mark.parametrize("conditional", [False, True], ids=["any", "if-match"])
def test_each_acknowledged_change_is_in_the_history(
    new_url: Callable[[], str], base: BaseModel, conditional: bool
) -> None:
    url = new_url()
    registry = Registry(open_store(url), base)
    function_with_versions(registry)
    began = registry.function("acme", "f").generation
    with movers(url, conditional) as processes:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        outputs = [process.communicate(timeout=120)[0] for process in processes]
        assert [process.returncode for process in processes] == [0] * WRITERS
    acknowledged = [json.loads(line) for output in outputs for line in output.splitlines()]
    record = registry.function("acme", "f")
    alias = record.aliases["prod"]
    seen = [past.weights for past in alias.history] + [alias.weights]
    assert len(acknowledged) == WRITERS * CHANGES == len(seen)
    # Each has a generation of its own, and stands in the history at its place.
    assert sorted(acknowledged) == [[began + 1 + index, weights] for index, weights in enumerate(seen)]
    assert (record.generation, alias.generation) == (began + len(seen), len(seen))
