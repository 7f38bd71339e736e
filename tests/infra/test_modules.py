"""The hand-written modules: formatted, described, documented, and tested by Terraform itself where it is there."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from stacks import needs_terraform

from infra.render import MODULES
from infra.terraform import environment, find_program

NAMES = sorted(path.name for path in MODULES.iterdir())
OFFLINE = ("local_pool",)
"""Modules that need no provider beyond Terraform itself."""
BLOCK = re.compile(r'^(variable|output) "(\w+)" \{\n(.*?)^\}', re.DOTALL | re.MULTILINE)


def blocks(module: str, kind: str) -> dict[str, str]:
    """Bodies of a module's variables or outputs by name."""
    text = "\n".join(file.read_text() for file in sorted((MODULES / module).glob("*.tf")))
    return {name: body for found, name, body in BLOCK.findall(text) if found == kind}


def run(directory: Path, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [find_program().path, *arguments], cwd=directory, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


@needs_terraform
def test_they_are_formatted() -> None:
    assert run(MODULES, "fmt", "-check", "-diff", "-recursive").stdout == ""


@pytest.mark.parametrize("module", NAMES)
def test_variables_are_typed_and_described_and_documented(module: str) -> None:
    variables, outputs = blocks(module, "variable"), blocks(module, "output")
    assert variables and outputs
    readme = (MODULES / module / "README.md").read_text()
    for name, body in {**variables, **outputs}.items():
        assert re.search(r'^  description = ".+"$', body, re.MULTILINE), name
        assert re.search(rf"`{name}`", readme), f"{module}/README.md does not tell of {name}"
    for name, body in variables.items():
        assert re.search(r"^  type\s+= ", body, re.MULTILINE), name
    assert len(re.findall(r"\n  validation \{", "".join(variables.values()))) >= 3


@needs_terraform
@pytest.mark.parametrize("module", NAMES)
def test_terraform_tests_it(module: str, tmp_path: Path) -> None:
    """validate, and the module's own tests; a copy, so that nothing is left in the tree."""
    copy = tmp_path / module
    shutil.copytree(MODULES / module, copy, ignore=shutil.ignore_patterns(".terraform*"))
    initialised = run(copy, "init", "-no-color", "-backend=false", check=False)
    if initialised.returncode != 0 and module not in OFFLINE:
        pytest.skip(f"{module}: its provider can't be installed here, so Terraform has NOT validated or tested it")
    assert initialised.returncode == 0, initialised.stderr
    run(copy, "validate", "-no-color")
    done = run(copy, "test", "-no-color")
    assert re.search(r"Success! \d+ passed, 0 failed", done.stdout), done.stdout
