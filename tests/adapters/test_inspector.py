"""The helper process that looks at adapters: the same outcomes as in this process, limits, and its death."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from peft_files import adapter, changed, safetensors_bytes

from adapters.base_model import BaseModel
from adapters.deployment import AdapterUpload
from adapters.errors import MAX_PROBLEMS, AdapterError, InspectionBusy, InvalidAdapter, TooLarge
from adapters.helper_process import MEMORY_BYTES, NICENESS, HelperProcess
from adapters.inspector import Inspector
from adapters.local_store import LocalStore
from adapters.peft_config import MAX_CONFIG_BYTES
from adapters.peft_format import MAX_HEADER_BYTES
from adapters.registry import Registry
from adapters.validate import SPARE_TENSORS, Inspection, inspect_files

ENDLESS = r"(.*)*(.*)*(.*)*X"


@pytest.fixture(scope="module")
def inspector(base: BaseModel) -> Iterator[Inspector]:
    with closing(Inspector(base)) as made:
        yield made


def test_the_process_knows_no_secrets(
    base: BaseModel, good: tuple[bytes, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    monkeypatch.setenv("GARNISH_KEY", "hidden")
    with closing(Inspector(base)) as made:
        made.inspect(*good)
        process = made.helpers[0].process
        assert process is not None
        environment = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
    assert any(line.startswith(b"PATH=") for line in environment)
    assert not any(b"hidden" in line for line in environment)


def outcome(config: bytes, weights: Path, look: object) -> Inspection | list[object]:
    try:
        return look(config, weights)  # type: ignore[operator]
    except InvalidAdapter as error:
        return [str(error), error.problems]
    except AdapterError as error:
        return [type(error), str(error)]


def pid_of(inspector: Inspector) -> int | None:
    """Of the latest helper process; None before the first one was needed."""
    return None if inspector.helpers[0].process is None else inspector.helpers[0].process.pid


def files(folder: Path, good: tuple[bytes, Path]) -> list[tuple[bytes, Path]]:
    config, weights = good
    many = {f"model.layers.0.lora.{number}": 1 for number in range(3000)}
    broken = {"zip": b"PK\x03\x04rest", "empty": b"", "many": safetensors_bytes(json.dumps(many).encode())}
    for name, data in broken.items():
        (folder / name).write_bytes(data)
    return [
        good,
        adapter(folder / "regex", target_modules=r".*\.(q|v)_proj", rank_pattern={r"layers\.1\..*": 3}),
        adapter(
            folder / "list", target_modules=["q_proj"], rank_pattern={r"layers\.1\..*": 4}, alpha_pattern={"q_proj": 3}
        ),
        *((config, folder / name) for name in broken),
        (b"{", weights),
        (b"{" + b" " * MAX_CONFIG_BYTES, weights),
        (changed(config, use_dora=True, r=9, base_model_name_or_path="another"), weights),
        (changed(config, target_modules="(q_proj", rank_pattern={"*": 4}), weights),
        (changed(config, **{f"field{number}": 1 for number in range(MAX_PROBLEMS + 7)}), weights),
        (changed(config, target_modules=["nothing"]), weights),
    ]


def test_outcomes_are_those_of_this_process(
    tmp_path: Path, base: BaseModel, good: tuple[bytes, Path], inspector: Inspector
) -> None:
    given = files(tmp_path, good)
    seen = [outcome(*pair, inspector.inspect) for pair in given]
    assert seen == [outcome(*pair, partial(inspect_files, base=base)) for pair in given]
    assert [isinstance(each, Inspection) for each in seen].count(True) >= 2
    assert [TooLarge] == [each[0] for each in seen if not isinstance(each, Inspection) and each[0] is TooLarge]


def test_one_process_of_low_priority_looks_at_all(good: tuple[bytes, Path], inspector: Inspector) -> None:
    inspector.inspect(*good)
    pid = pid_of(inspector)
    assert pid is not None
    with ThreadPoolExecutor(4) as pool:
        seen = list(pool.map(lambda _: inspector.inspect(*good), range(20)))
    assert all(each == seen[0] for each in seen)
    assert pid_of(inspector) == pid
    assert os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, 0) + NICENESS


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("target_modules", ENDLESS),
        ("exclude_modules", r"([a-z0-9._]+)+X"),
        ("rank_pattern", {r"(([a-z0-9._]+)+)+X": 4}),
        ("alpha_pattern", {r"(([a-z0-9._]+)+)+X": 4}),
    ],
)
def test_expressions_that_never_end(
    good: tuple[bytes, Path], inspector: Inspector, field: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adapters.inspector.MATCH_SECONDS", 0.25)
    with pytest.raises(InvalidAdapter, match="take too long to match") as raised:
        inspector.inspect(changed(good[0], **{field: value}), good[1])
    assert raised.value.problems[0].expected == "0.25 s"
    assert inspector.inspect(*good).problems == ()


@pytest.mark.parametrize("piece", [b"[{}],", pytest.param(b'{"":{}},', marks=pytest.mark.slow)])
def test_headers_that_need_too_much_memory(
    tmp_path: Path, good: tuple[bytes, Path], inspector: Inspector, piece: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a slow host, reading such a header takes too much processor time first."""
    monkeypatch.setattr("adapters.inspector.ANSWER_SECONDS", 240.0)
    count = (MAX_HEADER_BYTES - 100) // len(piece)
    header = b'{"a":[' + piece * count + b"[]]}"
    (tmp_path / "weights").write_bytes(safetensors_bytes(header))
    with pytest.raises(InvalidAdapter) as raised:
        inspector.inspect(good[0], tmp_path / "weights")
    problem = raised.value.problems[0]
    assert len(raised.value.problems) == 1
    assert (problem.problem, problem.expected) in (
        ("reading its header takes too much memory", f"at most {MEMORY_BYTES} bytes"),
        ("reading its header takes too long", "5 s"),
    )
    inspector.inspect(*good)
    resident = int(Path(f"/proc/{pid_of(inspector)}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    assert resident < 128 << 20  # what the hostile one took is given back


@pytest.mark.parametrize("entry", [b"1", b'{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'])
def test_a_header_of_too_many_tensors(
    tmp_path: Path, base: BaseModel, good: tuple[bytes, Path], inspector: Inspector, entry: bytes
) -> None:
    """Refused with one problem, which names the limit; one that just keeps it is looked at tensor by tensor.

    Reading the largest header may also exceed the time limit, on a slow host.
    """
    most = 2 * len(base.modules.adaptable) + SPARE_TENSORS
    found = []
    for count in (most, most + 1, (MAX_HEADER_BYTES - 100) // (len(entry) + 12)):
        header = b"{" + b",".join(b'"%x":%s' % (number, entry) for number in range(count)) + b"}"
        (tmp_path / "weights").write_bytes(safetensors_bytes(header))
        with pytest.raises(InvalidAdapter) as raised:
            inspector.inspect(good[0], tmp_path / "weights")
        found.append(raised.value.problems)
    assert found[0][0].problem != "its header lists too many tensors"
    too_many = [("its header lists too many tensors", f"at most {most}")]
    assert [(problem.problem, problem.expected) for problem in found[1]] == too_many
    largest = [(problem.problem, problem.expected) for problem in found[2]]
    assert largest in (too_many, [("reading its header takes too long", "5 s")])


def test_a_process_that_is_killed_is_replaced(good: tuple[bytes, Path], inspector: Inspector) -> None:
    """Idle, and in the middle of its work, which may then be tried again."""
    inspector.inspect(*good)
    first = pid_of(inspector)
    assert first is not None
    os.kill(first, signal.SIGKILL)
    _until_ended(first)
    inspector.inspect(*good)
    pid = pid_of(inspector)
    assert pid is not None
    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(inspector.inspect, changed(good[0], target_modules=ENDLESS), good[1])
        before = _ticks(pid)
        while _ticks(pid) < before + 5:
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(InspectionBusy, match="try again later"):
            looking.result(60)
    assert inspector.inspect(*good).problems == ()


def test_who_waits_too_long_may_try_again(
    good: tuple[bytes, Path], base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Inspector(base)) as inspector:
        inspector.inspect(*good)
        first = pid_of(inspector)
        assert first is not None
        os.kill(first, signal.SIGSTOP)
        monkeypatch.setattr("adapters.inspector.ANSWER_SECONDS", 0.2)
        with pytest.raises(InspectionBusy, match="too busy to inspect an adapter"):
            inspector.inspect(*good)
        monkeypatch.setattr("adapters.inspector.ANSWER_SECONDS", 60.0)
        inspector.inspect(*good)
        monkeypatch.setattr("adapters.inspector.WAIT_SECONDS", 0.2)
        held = threading.Thread(
            target=lambda: outcome(changed(good[0], target_modules=ENDLESS), good[1], inspector.inspect)
        )
        held.start()
        while not inspector.idle.empty():
            time.sleep(0.01)
        with pytest.raises(InspectionBusy, match="other adapters were inspected"):
            inspector.inspect(*good)
        inspector.close()
        held.join(60)


def test_one_that_takes_long_holds_up_no_other(good: tuple[bytes, Path], base: BaseModel) -> None:
    with closing(Inspector(base, 2)) as inspector, ThreadPoolExecutor(1) as pool:
        inspector.inspect(*good)
        stopped = inspector.helpers[1]  # the last one that was put is used first
        assert stopped.process is not None and inspector.helpers[0].process is None
        os.kill(stopped.process.pid, signal.SIGSTOP)
        looking = pool.submit(inspector.inspect, *good)
        while inspector.idle.qsize() == 2:
            time.sleep(0.01)
        assert inspector.inspect(*good).problems == ()
        assert not looking.done()
        os.kill(stopped.process.pid, signal.SIGCONT)
        assert looking.result(60).problems == ()


def test_it_ends_with_its_owner(good: tuple[bytes, Path], base: BaseModel) -> None:
    inspector = Inspector(base)
    inspector.inspect(*good)
    process, connection = inspector.helpers[0].process, inspector.helpers[0].connection
    assert process is not None and connection is not None
    connection.close()  # as when the gateway is killed
    assert process.wait(60) == 0


def test_deploys_and_dry_runs_are_looked_at_there(
    registry: Registry, good: tuple[bytes, Path], inspector: Inspector
) -> None:
    helped = Registry(registry.store, registry.base, inspector.inspect)
    assert helped.check(AdapterUpload(*good)) == registry.check(AdapterUpload(*good))
    made = helped.deploy("acme", "f", AdapterUpload(*good))
    again = registry.deploy("acme", "f", AdapterUpload(*good))
    assert (made.version, made.digest) == (again.version, again.digest)
    upload = AdapterUpload(changed(good[0], use_dora=True), good[1])
    for look in (helped.check, lambda upload: helped.deploy("acme", "f", upload)):
        with pytest.raises(InvalidAdapter, match="use_dora"):
            look(upload)


def _ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11])


def _until_ended(pid: int) -> None:
    while Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
        time.sleep(0.01)


def test_a_registry_without_an_inspector_limits_patterns_too(
    good: tuple[bytes, Path], base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks at names in its own thread, and at regular expressions in a process that is gone afterwards."""
    config, weights = good
    registry = Registry(LocalStore(tmp_path / "registry"), base)
    started: list[HelperProcess] = []
    begin = HelperProcess._started

    def note(helper: HelperProcess, seconds: float) -> socket.socket:
        started.append(helper)
        return begin(helper, seconds)

    monkeypatch.setattr(HelperProcess, "_started", note)
    assert registry.check(AdapterUpload(config, weights)).digest
    assert started == []
    monkeypatch.setattr("adapters.inspector.MATCH_SECONDS", 0.25)
    for field, value in (
        ("target_modules", r"(.+.+)+x"),
        ("exclude_modules", r"(.+.+)+x"),
        ("rank_pattern", {r"(.+.+)+x": 4}),
        ("alpha_pattern", {r"(.+.+)+x": 4}),
    ):
        with pytest.raises(InvalidAdapter, match="take too long"):
            registry.check(AdapterUpload(changed(config, **{field: value}), weights))
        process = started[-1].process
        assert process is not None
        assert process.returncode is not None
    assert registry.check(AdapterUpload(changed(config, target_modules=r".*\.(q_proj|v_proj)"), weights)).digest
