"""Logs of processes that have vLLM: records, printed lines and stack traces, each once and in the node's format."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from node_agent.vllm.logs import secrets_in

ROOT = Path(__file__).parents[3]
START = "import logging, sys\nfrom node_agent.vllm.logs import take_logs\ntake_logs({process!r})\n"
MAIN = """
import multiprocessing, os, sys
if __name__ == "__mp_main__":
    from node_agent.vllm.spawned import begin_spawned
    begin_spawned()

def fail(logged):
    import logging
    try:
        raise ValueError("weights are short")
    except ValueError:
        if logged:
            logging.getLogger("vllm.worker").exception("it failed to start")
        raise

if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=fail, args=(sys.argv[1] == "logged",), name="Worker-0")
    child.start()
    child.join()
"""


def lines_of(*command: str, **environment: str) -> list[dict[str, Any]]:
    """Runs Python. Returns the lines that it logged, all of which must be JSON."""
    ran = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        timeout=120,
    )
    assert not ran.stdout
    return [json.loads(line) for line in ran.stderr.splitlines()]


def run(code: str, process: str = "", **environment: str) -> list[dict[str, Any]]:
    return lines_of("-c", START.format(process=process) + code, **environment)


def told(lines: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    return [(line["level"], line["logger"], line["message"]) for line in lines]


def test_vllms_records_keep_their_levels_and_name_their_process() -> None:
    code = """
for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
    logging.getLogger("vllm.v1.core").log(level, "step %d", level)
"""
    lines = run(code, "EngineCore")
    assert told(lines) == [
        ("info", "vllm.v1.core", "step 20"),
        ("warning", "vllm.v1.core", "step 30"),
        ("error", "vllm.v1.core", "step 40"),
    ]
    assert {(line["process"], line["vllm"]) for line in lines} == {("engine", "EngineCore")}
    assert [line["level"] for line in run(code, VLLM_LOGGING_LEVEL="debug")] == ["debug", "info", "warning", "error"]
    assert "vllm" not in run(code)[0], "the engine process is no process of vLLM's"


def test_what_is_printed_becomes_records() -> None:
    code = """
import warnings
print("half ", end="")
print("a line\\n\\nanother", flush=True)
print("\\rLoading: 0 %")
print("W1129 12:00:00.1 77 torch/a.py:5] slow", file=sys.stderr)
warnings.warn("old", DeprecationWarning)
sys.stderr.fileno()
"""
    lines = run(code)
    assert told(lines)[:3] == [
        ("info", "printed", "half a line"),
        ("info", "printed", "another"),
        ("warning", "printed", "W1129 12:00:00.1 77 torch/a.py:5] slow"),
    ]
    assert [line["logger"] for line in lines[3:]] in ([], ["py.warnings"])


@pytest.mark.parametrize("logged", ["logged", "unlogged"])
def test_an_exception_that_ends_a_process_is_told_once(tmp_path: Path, logged: str) -> None:
    (tmp_path / "main.py").write_text(MAIN)
    (line,) = lines_of(str(tmp_path / "main.py"), logged)
    message = "it failed to start" if logged == "logged" else "an exception was not caught"
    assert (line["level"], line["vllm"], line["message"]) == ("error", "Worker-0", message)
    assert line["exception"].endswith("ValueError: weights are short")


def test_the_exception_of_a_thread_is_one_record() -> None:
    code = """
import threading
def fail(): raise KeyError("x")
thread = threading.Thread(target=fail, name="t")
thread.start(); thread.join()
print("after")
"""
    first, second = run(code)
    assert first["level"] == "error" and first["exception"].endswith("KeyError: 'x'")
    assert second["message"] == "after"


def test_secrets_and_what_callers_sent_are_hidden() -> None:
    code = """
log = logging.getLogger("vllm.config")
log.info("token=%s", "hf_abcdefgh1234")
try:
    raise OSError("http://u:pass-word-1@host")
except OSError:
    log.exception("failed")
print("hf_abcdefgh1234")
logging.getLogger("vllm.logging_utils.dump_input").error("Dumping scheduler output: %s", "the prompt")
"""
    lines = run(code, HF_TOKEN="hf_abcdefgh1234", STORE_PASSWORD="pass-word-1")
    text = json.dumps(lines)
    assert len(lines) == 3 and text.count("***") >= 3
    assert not any(secret in text for secret in ("hf_abcdefgh1234", "pass-word-1", "the prompt"))


def test_a_disk_that_takes_no_line_ends_nothing(tmp_path: Path) -> None:
    code = (
        START.format(process="EngineCore")
        + """
for _ in range(100):
    logging.getLogger("vllm").error("lost")
    print("lost, too", flush=True)
    print("Traceback (most recent call last):\\nKeyError: 1", file=sys.stderr, flush=True)
print("done", file=open("done", "w"))
"""
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with Path("/dev/full").open("w") as full:
        subprocess.run(
            [sys.executable, "-c", code], check=True, stderr=full, cwd=tmp_path, env=environment, timeout=120
        )
    assert (tmp_path / "done").read_text() == "done\n"


def test_which_variables_are_secret() -> None:
    secret = {
        "HF_TOKEN": "a" * 20, "AWS_SECRET_ACCESS_KEY": "b" * 20, "AWS_ACCESS_KEY_ID": "c" * 20, "SOME_API_KEY": "d" * 8,
        "DB_PASSWORD": "e" * 30,
    }  # fmt: skip
    other = {
        "TOKENIZERS_PARALLELISM": "false-or-true",
        "HOME": "/home/somebody",
        "MY_TOKEN": "short",
        "KEYBOARD": "z" * 9,
    }
    assert sorted(secrets_in(secret | other)) == sorted(secret.values())
    assert secrets_in(secret | other)[0] == "e" * 30, "a secret may contain another"
