"""`garnish profile` as real processes: what it leaves, and that the measurement never outlives whoever waits for it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from cluster.performance_file import read_performance
from cluster.performance_fit import PaperForm
from garnish.cli.profile import run_measurement, show
from garnish.errors import FrontDoorError
from garnish.screen import Screen
from node_agent.coldstart.profile import CpuLora, LinkCost, Profile, ProfileKey, check
from node_agent.config import EngineConfig, ProfileProcessConfig, VllmConfig
from tests.cluster.measured import PROFILE

ROOT = Path(__file__).parents[2]
SECONDS = 200
NO_ENGINE = EngineConfig(model_dir="/nowhere", base_id="none", registry="/nowhere", profile="/nowhere/profile.json")
COLD = Profile(ProfileKey("f", "bfloat16", "cpu", 1, 1), ((16, 1e-3),), CpuLora(1e-5, 0.0, 1e-9), LinkCost(1e-4, 2e9))


@pytest.fixture
def folder(tmp_path: Path, stories_dir: Path) -> Path:
    """With a service file of one small node."""
    sizes = {"adapter_memory": "4MiB", "host_memory": "4MiB", "kv_memory": "1MiB"}
    service = {"service": "s", "base_model": str(stories_dir), "node": {"device": "cpu", "dtype": "float32", **sizes}}
    (tmp_path / "serverless.yml").write_text(json.dumps(service))
    return tmp_path


def begin(folder: Path, *options: str) -> subprocess.Popen[bytes]:
    # whoever runs the tests in the background has SIGINT ignored, and children inherit that
    command = ["env", "--default-signal=INT", sys.executable, "-m", "garnish.cli.main", "profile", "--state", "state"]
    command += options
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def child_of(pid: int) -> int:
    """The only child of a process of one thread."""
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


@pytest.mark.alone  # other tests on its cores would leave no performance model to measure
def test_it_leaves_a_profile_that_the_node_reads(folder: Path) -> None:
    with begin(folder, "--json") as process:
        output, told = process.communicate(timeout=SECONDS)
    steps = [line for line in told.decode().splitlines() if line.startswith(("loading the", "measuring "))]
    assert steps[:2] == ["loading the base model", "measuring a layer on the device"]
    written = (folder / "state" / "profiles" / "node-1.json").read_bytes()
    profile = msgspec.json.decode(written, type=Profile)
    check(profile)
    assert [tokens for tokens, _ in profile.layer][:3] == [8, 16, 32]
    assert {"writing the cache", "measuring passes"} <= set(told.decode().splitlines())
    file = folder / "state" / "profiles" / "node-1.performance.json"
    if process.returncode == 1:  # this host is too busy now for times of a millisecond to follow anything
        assert b"the node can't be measured: its performance model: " in told and b"R^2 is" in told, told
        assert not file.exists() or not read_performance(file, None).thorough
        pytest.skip("NOT RUN to its end: this host is too busy to measure a performance model")
    assert process.returncode == 0, told
    performance = read_performance(file, None)
    assert performance.thorough
    assert json.loads(output) == {
        "cold_start": json.loads(written),
        "performance": json.loads(msgspec.json.encode(performance)),
    }


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_measurement_ends_with_the_command(folder: Path, number: signal.Signals) -> None:
    """Also when the command is killed and can't say anything to it."""
    with begin(folder) as process:
        assert process.stderr is not None and process.stdout is not None
        assert process.stderr.readline() == b"loading the base model\n"
        measuring = os.pidfd_open(child_of(process.pid))
        process.send_signal(number)
        try:
            assert select.select([measuring], [], [], 30)[0], "it measures on for nobody"
        finally:
            os.close(measuring)
        process.communicate(timeout=SECONDS)
    assert process.returncode in (-signal.SIGKILL, 130)
    assert not list((folder / "state").glob("profiles/*"))


def test_a_node_that_can_not_be_measured_is_told(folder: Path) -> None:
    (folder / "empty").mkdir()
    (folder / "empty" / "config.json").write_text("{}")
    service = json.loads((folder / "serverless.yml").read_text())
    (folder / "serverless.yml").write_text(json.dumps({**service, "base_model": "empty"}))
    with begin(folder) as process:
        output, told = process.communicate(timeout=SECONDS)
    assert (process.returncode, output) == (1, b"")
    assert b"garnish: the node can't be measured: " in told
    assert b"Traceback" not in told


SILENT = """
import os, time
os.write(1, b'{"type": "step", "text": "%d"}\\n' % os.getpid())
time.sleep(600)
"""


def test_silence_has_an_end() -> None:
    """The process that said nothing more is gone by then."""
    steps: list[str] = []
    with pytest.raises(FrontDoorError, match="wrote nothing for 1 s"):
        run_measurement(NO_ENGINE, lambda text, _: steps.append(text), (sys.executable, "-c", SILENT), patience=1.0)
    with pytest.raises(ProcessLookupError):
        os.kill(int(steps[0]), 0)


def test_an_early_end_is_told() -> None:
    with pytest.raises(FrontDoorError, match="ended too early"):
        run_measurement(NO_ENGINE, print, (sys.executable, "-c", "raise SystemExit(3)"))


def test_a_vllm_is_measured_in_its_own_environment() -> None:
    config = msgspec.structs.replace(NO_ENGINE, engine="vllm", vllm=VllmConfig("/nowhere/python"))
    with pytest.raises(FrontDoorError, match="the measurement: /nowhere/python can't be run: No such file"):
        run_measurement(config, print)


def test_a_vllm_has_no_cold_start_profile(capsys: pytest.CaptureFixture[str]) -> None:
    decode, prefill = PROFILE.decode, PROFILE.prefill
    padded = msgspec.structs.replace(decode.model, padded_rank=64)
    found = msgspec.structs.replace(PROFILE, decode=msgspec.structs.replace(decode, model=padded), prefill=prefill)
    measured = {"cold_start": None, "performance": msgspec.to_builtins(found)}
    show(measured, Path("state/node-1.json"), Screen())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("a decode step: 30.00 ms")
    assert "us of the ranks of adapters, each adapter counted as rank 64 (R^2" in lines[0]
    assert lines[-1] == "written to state/node-1.performance.json"


def test_a_measurement_without_its_command_does_not_start() -> None:
    settings = msgspec.json.encode(ProfileProcessConfig(parent=os.getppid(), engine=NO_ENGINE))
    command = [sys.executable, "-m", "node_agent.profile_process"]
    done = subprocess.run(command, cwd=ROOT, input=settings, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"is gone" in done.stderr


@pytest.mark.parametrize("paper", [(), (PaperForm("bgmv", 1e-6, 0.02, 0.9611, 32),)])
def test_costs_and_their_quality_are_printed(capsys: pytest.CaptureFixture[str], paper: tuple[PaperForm, ...]) -> None:
    performance = msgspec.to_builtins(msgspec.structs.replace(PROFILE, paper=paper))
    show({"cold_start": msgspec.to_builtins(COLD), "performance": performance}, Path("state/node-1.json"), Screen())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "a layer on the device, by prompt tokens: 16: 1.00 ms"
    quality = " (R^2 0.990, held-out error 2.0%, 2 configurations, 0 set aside)"
    step = "30.00 ms + 100.0 us a row + 10.0 ns a token of context + 1.00 us of the ranks of adapters"
    assert f"a decode step: {step}{quality}" in lines
    prompts = "10.00 ms + 500.0 us a token + 0.00 ns a token squared + 100.0 ns a token and rank"
    assert f"a pass over prompts: {prompts}{quality}" in lines
    forms = [line for line in lines if line.startswith("a decode step by the rank term alone")]
    assert forms == (["a decode step by the rank term alone, batches of 4 to 32: R^2 0.961 (bgmv)"] if paper else [])
    assert lines[-1] == "written to state/node-1.json and node-1.performance.json"
