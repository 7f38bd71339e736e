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


def copied(module: str, folder: Path) -> Path:
    """So that nothing is left in the tree."""
    copy = folder / module
    shutil.copytree(MODULES / module, copy, ignore=shutil.ignore_patterns(".terraform*"))
    return copy


def validate_and_test(copy: Path) -> None:
    """`copy` is initialised."""
    run(copy, "validate", "-no-color")
    done = run(copy, "test", "-no-color")
    assert re.search(r"Success! \d+ passed, 0 failed", done.stdout), done.stdout


@needs_terraform
@pytest.mark.parametrize("module", NAMES)
def test_terraform_tests_it(module: str, tmp_path: Path) -> None:
    copy = copied(module, tmp_path)
    initialised = run(copy, "init", "-no-color", "-backend=false", check=False)
    if initialised.returncode != 0 and module not in OFFLINE:
        pytest.skip(f"{module}: the AWS provider itself can't be installed here, so it has NOT checked the module")
    assert initialised.returncode == 0, initialised.stderr
    validate_and_test(copy)


@needs_terraform
@pytest.mark.parametrize("module", [name for name in NAMES if name not in OFFLINE])
def test_terraform_tests_it_by_the_providers_schema(module: str, tmp_path: Path, aws_provider: None) -> None:
    """A stand-in has the provider's schema, so this needs no download; `init` looks at its version."""
    copy = copied(module, tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TF_REATTACH_PROVIDERS")
        run(copy, "init", "-no-color", "-backend=false")
    validate_and_test(copy)


@needs_terraform
def test_the_schema_finds_mistakes(tmp_path: Path, aws_provider: None) -> None:
    copy = copied("aws_registry", tmp_path)
    text = (copy / "main.tf").read_text()
    run(copy, "init", "-no-color", "-backend=false")
    for right, wrong, told in (
        ("bucket_key_enabled = true", "bucket_keys = true", 'An argument named "bucket_keys" is not expected'),
        ('    status = "Enabled"\n  }\n}', "  }\n}", 'The argument "status" is required'),
        ("aws_s3_bucket.registry.arn,", "aws_s3_bucket.registry.ann,", 'exported attribute named "ann"'),
    ):  # fmt: skip
        assert right in text
        (copy / "main.tf").write_text(text.replace(right, wrong, 1))
        done = run(copy, "validate", "-no-color", check=False)
        assert done.returncode == 1 and told in " ".join(done.stderr.split()), done.stderr
