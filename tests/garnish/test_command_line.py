"""The command line as a process: exit codes, one-line errors, and how little it imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(
    "arguments",
    [
        ("nonsense",),
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
        ("nodes", "evict", "node-1"),
        ("nodes", "prefetch", "node-1", "name", "--digest", "0"),
        ("nodes", "--json", "drain", "node-1"),
        ("usage", "--group-by", "day"),
        ("usage", "--tenant", "a", "--all-tenants"),
    ],
)
def test_wrong_usage(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = garnish(tmp_path, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("list",), "unreachable: the service can't be reached"),
        (("list", "--url", "nonsense://x"), "unreachable"),
        (("up",), "serverless.yml: No such file or directory"),
        (("gateway", "-f", "nothing.yml"), "nothing.yml: No such file or directory"),
        (("node", "--gateway", "http://127.0.0.1:1"), "serverless.yml: No such file or directory"),
        (("deploy", "f", "nowhere"), "nowhere: expected a PEFT adapter's adapter_config.json"),
    ],
)
def test_failures_are_one_line(tmp_path: Path, arguments: tuple[str, ...], told: str) -> None:
    done = garnish(tmp_path, *arguments, GARNISH_URL="http://127.0.0.1:1")
    assert (done.returncode, done.stdout) == (1, "")
    last = done.stderr.splitlines()[-1]
    assert last.startswith("garnish: ")
    assert told in last
    assert "Traceback" not in done.stderr


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
    """No command loads torch into this process, and `import garnish` loads next to nothing."""
    code = "import sys, garnish; assert 'httpx' not in sys.modules; "
    code += "garnish.Client; import garnish.cli.main, garnish.up.run; "
    code += "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'gunicorn')))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
