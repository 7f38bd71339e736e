"""The command line: exit codes, one-line errors, and how little it imports."""

from __future__ import annotations

import json
import os
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer

from adapters.base_model import load_base_model
from adapters.deployment import AdapterUpload
from adapters.functions import Policy, parse_policy
from adapters.local_store import LocalStore
from adapters.registry import Registry
from garnish.cli.main import main
from garnish.cli.nodes import format_forecast_ratio, format_gpu, format_workers
from garnish.cli.versions import _field, parse_target
from tests.cluster.measured import PROFILE


def garnish(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "garnish.cli.main", *arguments],
        cwd=folder,
        env={**os.environ, "XDG_CONFIG_HOME": str(folder), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_version(tmp_path: Path) -> None:
    assert json.loads(garnish(tmp_path, "version", "--json").stdout).keys() == {"version"}


@pytest.mark.parametrize(("arguments", "code"), [(("nonsense",), 2), (("list", "--url", "nonsense://x"), 1)])
def test_the_exit_code_of_a_process(tmp_path: Path, arguments: tuple[str, ...], code: int) -> None:
    """The other tests call what the process runs."""
    done = garnish(tmp_path, *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr and "Traceback" not in done.stderr


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working directory, and a service that nobody serves."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("GARNISH_URL", "http://127.0.0.1:1")


def exit_of(*arguments: str) -> object:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return ended.value.code


@pytest.mark.parametrize(
    "arguments",
    [
        ("invoke", "only-a-name"),
        ("deploy", "only-a-name"),
        ("deploy", "name", ".", "-f", "serverless.yml"),
        ("up", "--port", "0"),
        ("up", "--nodes", "none"),
        ("list", "--unknown"),
        ("alias", "only-a-name"),
        ("alias", "name", "prod", "3", "4"),
        ("alias", "name", "prod", "3=x"),
        ("alias", "name", "prod", "3=0.5", "3=0.5"),
        ("delete", "name", "--version", "0"),
        ("delete", "name", "--version", "1", "--force"),
        ("delete", "name:1", "--force"),
        ("delete", "name:1", "--version", "1"),
        ("delete", "name:0"),
        ("delete", "name:prod"),
        ("nodes", "evict", "node-1"),
        ("nodes", "prefetch", "node-1", "name", "--digest", "0"),
        ("nodes", "--json", "drain", "node-1"),
        ("usage", "--group-by", "day"),
        ("usage", "--tenant", "a", "--all-tenants"),
    ],
)
@pytest.mark.usefixtures("empty_folder")
def test_wrong_usage(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_of(*arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err and "Traceback" not in shown.err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ("list", "--url", "nonsense://x"),
            "not a service's address: 'nonsense://x' (expected one such as",
        ),
        (("list", "--url", "127.0.0.1:8080"), "unreachable: not a service's address: '127.0.0.1:8080'"),
        (("up",), "serverless.yml: No such file or directory"),
        (("gateway", "-f", "nothing.yml"), "nothing.yml: No such file or directory"),
        (("node", "--gateway", "http://127.0.0.1:1"), "serverless.yml: No such file or directory"),
        (("deploy", "f", "nowhere"), "nowhere: there is no such folder"),
    ],
)
@pytest.mark.usefixtures("empty_folder")
def test_failures_are_one_line(arguments: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert told in failure(capsys, *arguments)


ASKING = (
    *(("list",), ("describe", "f"), ("delete", "f"), ("delete", "f:1"), ("deploy", "f", "ADAPTER"), ("usage",)),
    *(("alias", "f", "prod"), ("alias", "f", "prod", "1"), ("rollback", "f"), ("explain", "id"), ("nodes",)),
    *(("invoke", "f", "x"), ("invoke", "f", "x", "--stream"), ("deploy", "-f", "serverless.yml", "--dry-run")),
    *(("nodes", "adapters", "n"), ("nodes", "prefetch", "n", "f"), ("nodes", "drain", "n"), ("nodes", "undrain", "n")),
)
"""Every command that asks the service, without options."""


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with an adapter's name and a service file in it, and no credentials anywhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in ("GARNISH_URL", "GARNISH_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "ADAPTER").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / "ADAPTER" / name).write_text("{}")
    (tmp_path / "serverless.yml").write_text("service: s\nbase_model: ./b\nfunctions: {f: {adapter: ./ADAPTER}}\n")
    return tmp_path


def failure(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line, apart from progress, of a command that fails with exit code 1."""
    code = exit_of(*arguments)
    shown = capsys.readouterr()
    assert (code, shown.out) == (1, "")
    assert "Traceback" not in shown.err
    (line,) = [line for line in shown.err.splitlines() if line.startswith("garnish: ")]
    assert shown.err.endswith(line + "\n")
    return line


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("arguments", ASKING)
def test_a_service_that_is_down(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as bound:  # nobody listens on it
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        monkeypatch.setenv("GARNISH_URL", url)
        assert f"nothing answers at {url}: is it started? garnish up" in failure(capsys, *arguments)


@pytest.fixture(params=["a page", "a refusal", "a redirect", "another protocol"])
def foreign(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of something that is not Garnish."""
    answers = {
        "a page": b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 6\r\n\r\n<html>",
        "a refusal": b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\nno",
        "a redirect": b"HTTP/1.1 302 Found\r\nlocation: /login\r\ncontent-length: 0\r\n\r\n",
        "another protocol": b"220 mail.example ESMTP\r\n",
    }

    class Answer(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while self.rfile.readline().strip():
                pass
            self.wfile.write(answers[request.param])

    with socketserver.TCPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.usefixtures("elsewhere")
def test_an_address_that_is_not_garnish(foreign: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (("list",), ("nodes",), ("describe", "f")):
        line = failure(capsys, *arguments, "--url", foreign)
        assert foreign in line and "Garnish service" in line


@pytest.mark.parametrize(
    ("words", "target"),
    [
        (["4"], 4),
        (["3=0.9", "4=0.1"], {"3": 0.9, "4": 0.1}),
        (["3=90%", "4=10%"], {"3": 0.9, "4": 0.1}),
        (["3=1"], {"3": 1.0}),
    ],
)
def test_targets_of_aliases(words: list[str], target: int | dict[str, float]) -> None:
    assert parse_target(words) == target


def test_imports_stay_light() -> None:
    """No command loads torch into this process, those that ask a service load no numpy, and `import garnish` loads next
    to nothing."""
    code = "import sys, garnish; assert 'httpx' not in sys.modules; "
    code += "garnish.Client; assert not {'aiohttp', 'numpy'} & set(sys.modules); "
    code += "import garnish.cli.main, garnish.up.run; "
    code += "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'gunicorn')))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("idle_ttl=15m", 900),
        ("max_concurrency=8", 8),
        ("slo_class=strict", "strict"),
        ("prefetch=", None),
        ('warm=[{"cron": "0 9 * * *", "for": "15m"}]', [{"cron": "0 9 * * *", "for": 900}]),
        ('warm=[{"cron": "0 9 * * *", "for": 60}]', [{"cron": "0 9 * * *", "for": 60}]),
    ],
)
def test_a_field_is_what_a_gateway_takes(written: str, value: Any) -> None:
    field, read = _field(written)
    assert (field, read) == (written.partition("=")[0], value)
    if value is not None:
        parse_policy(msgspec.json.decode(msgspec.json.encode({field: read})), Policy())


@pytest.mark.parametrize(
    "written",
    ["max_concurrency", "idle_ttl=soon", 'warm=[{"cron": "0 9 * * *", "for": "90500ms"}]', 'warm=[{"for": "soon"}]'],
)
def test_a_mistake_names_the_field(written: str) -> None:
    with pytest.raises(typer.BadParameter, match=written.partition("=")[0]):
        _field(written)


@pytest.fixture
def folder(tmp_path: Path, stories_dir: Path, stories_adapters: dict[str, Path]) -> Path:
    """A service file, and the registry that it names with one function and an orphan of two days."""
    (tmp_path / "serverless.yml").write_text("service: s\nbase_model: ./base\nregistry: ./store\n")
    store, files = LocalStore(tmp_path / "store"), stories_adapters["dragon"]
    registry = Registry(store, load_base_model(stories_dir, "stories260K"))
    config = (files / "adapter_config.json").read_bytes()
    registry.deploy("acme", "dragon", AdapterUpload(config, files / "adapter_model.safetensors"))
    orphan = f"blobs/sha256/{'0' * 64}"
    store.put(orphan, b"12345")
    os.utime(tmp_path / "store" / orphan, (time.time() - 2 * 86400,) * 2)
    return tmp_path


def test_gc(folder: Path, command_line: Callable[..., Any]) -> None:
    orphan = folder / "store" / "blobs" / "sha256" / ("0" * 64)
    dry = command_line("registry", "gc", "--dry-run")
    assert dry.returncode == 0
    assert dry.stdout.splitlines() == [
        f"would remove blobs/sha256/{'0' * 64} (5 B)",
        "1 files, 0 artifacts and 0 manifests, 5 B would be removed; 3 files and artifacts stay",
    ]
    assert orphan.exists()
    done = json.loads(command_line("registry", "gc", "--json").stdout)
    assert (done["blobs"], done["bytes"], done["objects"]) == (1, 5, [f"blobs/sha256/{'0' * 64}"])
    assert not orphan.exists()
    assert "0 files" in command_line("registry", "gc").stdout


def test_verify(folder: Path, command_line: Callable[..., Any]) -> None:
    sound = command_line("registry", "verify")
    assert (sound.returncode, sound.stdout) == (0, "1 versions, 4 objects read; 0 versions are damaged\n")
    artifact = next((folder / "store" / "artifacts").rglob("*/*/*"))
    artifact.unlink()
    harmed = command_line("registry", "verify", "--json")
    assert harmed.returncode == 1
    (damage,) = json.loads(harmed.stdout)["damages"]
    assert (damage["version"], damage["problem"]) == ("acme/dragon:1", "is missing")
    assert damage["key"].endswith(artifact.name)


def test_a_registry_that_is_not_there(folder: Path, command_line: Callable[..., Any]) -> None:
    (folder / "serverless.yml").write_text("service: s\nbase_model: ./base\n")
    done = command_line("registry", "gc", "--state", "elsewhere")
    assert (done.returncode, done.stdout) == (1, "")
    assert "name the state directory with --state" in done.stderr
    assert not (folder / "elsewhere").exists(), "looking makes nothing"


@pytest.mark.parametrize(
    ("record", "shown"),
    [
        ({}, "no model"),
        ({"measuring": 0.0}, "measuring, 0%"),
        ({"measuring": 0.424}, "measuring, 42%"),
        ({"performance": msgspec.to_builtins(PROFILE.model)}, "-"),
        ({"performance": msgspec.to_builtins(PROFILE.model), "forecast_ratio": 1.0349}, "1.03"),
        ({"performance": msgspec.to_builtins(PROFILE.model), "forecast_ratio": 1.31}, "1.31, off"),
        ({"performance": msgspec.to_builtins(PROFILE.model), "forecast_ratio": 0.75}, "0.75, off"),
    ],
)
def test_forecasts_are_shown_where_there_are_any(record: dict[str, Any], shown: str) -> None:
    assert format_forecast_ratio(record) == shown


@pytest.mark.parametrize(
    ("record", "shown"),
    [
        ({}, "-"),
        ({"gpu": {"uuid": "GPU-1"}}, "GPU-1"),
        (
            {
                "gpu": {"uuid": "GPU-1", "index": 2, "name": "L4", "memory": 24 << 30, "slow_link": "half of it"},
                "gpu_load": {"memory_used": 5 << 30, "utilisation": 0, "temperature": 43, "throttled": ["thermal"]},
            },
            "2 L4, 5.0 GiB of 24.0 GiB, 0 %, 43 C, thermal, slow link",
        ),
        ({"gpu": {"uuid": "GPU-1", "name": "L4", "problem": "it does not return"}}, "L4, it does not return"),
    ],
)
def test_a_gpu_is_shown_as_far_as_it_is_known(record: dict[str, Any], shown: str) -> None:
    assert format_gpu(record) == shown


@pytest.mark.parametrize(
    ("record", "shown"),
    [
        ({"id": "n1"}, ""),
        ({"id": "n1", "cpu_workers": 2}, ""),
        ({"id": "n1", "cpu_workers": 0, "cpu_workers_reason": "little to gain"}, "n1: 0 CPU workers: little to gain"),
        ({"id": "n1", "cpu_workers": 1, "cpu_workers_reason": "as set"}, "n1: 1 CPU worker: as set"),
    ],
)
def test_the_reason_for_cpu_workers_is_shown_where_there_is_one(record: dict[str, Any], shown: str) -> None:
    assert format_workers(record) == shown
