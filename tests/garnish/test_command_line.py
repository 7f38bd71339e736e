"""The command line: exit codes, one-line errors, and how little it imports."""

from __future__ import annotations

import json
import os
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from garnish.cli.main import main
from garnish.cli.versions import parse_target


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
