"""Hostile configs and headers are looked at in helper processes, for deploys and dry runs; the gateway only waits."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from running_gateway import Running

from adapters import inspector
from adapters.helper_process import NICENESS

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PATHS = ("/deploy/f", "/deploy/f?dry_run=true")


def with_config(files: dict, **fields: object) -> dict:
    config = json.loads(files[CONFIG][1]) | fields
    return files | {CONFIG: (CONFIG, json.dumps(config).encode())}


@pytest.fixture
def own_children() -> set[int]:
    """Those that this process had before."""
    return children()


def children() -> set[int]:
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # a thread that has just ended
            found.update(map(int, (task / "children").read_text().split()))
    return found


def niceness(pid: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, pid) - os.getpriority(os.PRIO_PROCESS, 0)


def until_busy(before: set[int], calls: list[Future]) -> set[int]:
    """The processes that the gateway has started since, once one has used up half a second."""
    while True:
        assert not any(call.done() for call in calls)
        started = children() - before
        for pid in started:
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            if int(fields[11]) > os.sysconf("SC_CLK_TCK") / 2:
                return started
        time.sleep(0.01)


@pytest.mark.parametrize("field", ["target_modules", "rank_pattern"])
def test_expressions_without_end(
    gateway: Running, pirate: dict, own_children: set[int], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspector, "MATCH_SECONDS", 1.0)
    endless = r"(([a-z0-9._]+)+)+X"
    files = with_config(pirate, **{field: endless if field == "target_modules" else {endless: 4}})
    with ThreadPoolExecutor(2) as pool:
        # A niced process begins late on a host whose cores are all busy.
        calls = [pool.submit(gateway.client().post, path, files=files, timeout=240) for path in PATHS]
        started = until_busy(own_children, calls)
        assert len(started) in (1, 2), "one for each, if the second one has begun"
        assert NICENESS in [niceness(pid) for pid in started]  # a second one may be about to set it
        for call in calls:
            reply = call.result(250)
            assert reply.status_code == 422
            detail = reply.json()["error"]["details"][0]
            assert detail["tensor"] == "adapter_config.json#target_modules"
            assert (detail["problem"], detail["expected"]) == ("its regular expressions take too long to match", "1 s")
    assert gateway.client().post("/deploy/f", files=pirate).status_code == 201


def test_a_header_of_too_many_tensors(gateway: Running, pirate: dict) -> None:
    header = b"{" + b",".join(b'"%x":1' % number for number in range(400_000)) + b"}"
    weights = len(header).to_bytes(8, "little") + header
    for path in PATHS:
        reply = gateway.client().post(path, files=pirate | {WEIGHTS: (WEIGHTS, weights)})
        assert reply.status_code == 422
        (detail,) = reply.json()["error"]["details"]
        assert (detail["problem"], detail["found"]) == ("its header lists too many tensors", "400000")
        assert detail["expected"] == f"at most {gateway.base.num_layers * 14 + 4096}"
