"""The root module: stable, reviewable, complete, and free of templates and secrets that nobody meant."""

from __future__ import annotations

import json
import subprocess
import tomllib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stacks import needs_terraform, pool, stack

from adapters.s3_url import S3Place
from infra.errors import InfraError
from infra.render import MODULES, ROOT_FILE, render, text_of, write_root
from infra.terraform import environment, find_program
from infra.text import literal

ROOT = Path(__file__).parents[2]


def test_the_order_of_pools_in_the_file_changes_nothing() -> None:
    pools = [pool("a"), pool("b", 2), pool("c", 0)]
    assert text_of(render(stack(*pools))) == text_of(render(stack(*reversed(pools))))


def test_a_pool_is_a_module() -> None:
    root = render(stack(pool("gpu.fast", 2, min=1)))
    module = root["module"]["pool_gpu_fast"]
    assert (module["source"], module["pool"]) == ("./modules/local_pool", "gpu.fast")
    assert (module["min"], module["desired"], module["max"]) == (1, 2, 3)
    assert root["output"]["pools"]["value"]["gpu.fast"]["nodes"] == "${module.pool_gpu_fast.nodes}"


def test_no_pools_at_all() -> None:
    empty = msgspec.structs.replace(stack(), pools=())
    assert "module" not in render(empty)


def test_state_lies_beside_the_root_module_or_locked_on_s3() -> None:
    assert render(stack())["terraform"]["backend"] == {"local": {"path": "terraform.tfstate"}}
    far = render(msgspec.structs.replace(stack(), state=S3Place("acme", "tf/prod")))
    assert far["terraform"]["backend"] == {
        "s3": {"bucket": "acme", "key": "tf/prod/demo/terraform.tfstate", "encrypt": True, "use_lockfile": True}
    }


@pytest.mark.parametrize(
    ("pools", "problem"),
    [
        ((pool("a", 5),), r"node_pools.a: expected min <= desired <= max, found 0, 5, 3"),
        ((pool("a", 1, min=2),), "min <= desired <= max"),
        ((pool("a.b"), pool("a_b")), "a.b and a_b are one name to Terraform"),
        ((pool("node"),), "give the pool another name"),
        ((pool("a", max=65),), "at most 64 nodes, found max 65"),
        ((pool("a", backend="aws"),), "needs an instance_type"),
        ((pool("a", instance_type="g6e.xlarge"),), "takes no instance_type"),
        ((pool("a", backend="aws", instance_type="g6e.xlarge"),), "needs the section infra.aws"),
    ],
)
def test_what_can_not_be_is_refused(pools: tuple[object, ...], problem: str) -> None:
    with pytest.raises(InfraError, match=problem):
        render(stack(*pools))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["..", "a/b", "Support Desk", "", "a" * 65])
def test_a_service_whose_name_is_no_folder_is_refused(name: str) -> None:
    with pytest.raises(InfraError, match="service"):
        render(msgspec.structs.replace(stack(), service=name))


def test_files_written(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_root(stack(), out)
    for name, file in (("aws_pool", "main.tf"), ("network", "main.tf")):
        (out / "modules" / name).mkdir()
        (out / "modules" / name / file).touch()
    (out / "modules" / "local_pool" / "stray.tf").touch()
    (out / "terraform.tfstate").write_text("kept")
    text = write_root(stack(), out)
    assert (out / ROOT_FILE).read_text() == text
    assert sorted(path.name for path in (out / "modules").iterdir()) == ["local_pool", "network"]
    assert (out / "modules" / "network" / "main.tf").exists(), "a module of somebody else's stays"
    files = {path.name for path in (out / "modules" / "local_pool").iterdir()}
    assert files == {"main.tf", "variables.tf", "outputs.tf", "versions.tf", "README.md"}
    assert (out / "terraform.tfstate").read_text() == "kept"


def test_a_directory_that_can_not_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InfraError, match="file"):
        write_root(stack(), tmp_path / "file")


@given(st.text(max_size=30))
def test_a_text_without_templates_is_itself(text: str) -> None:
    escaped = literal(text)
    assert escaped.replace("$${", "${").replace("%%{", "%{") == text or "$${" in text or "%%{" in text
    if "${" not in text and "%{" not in text:
        assert escaped == text


@needs_terraform
@pytest.mark.parametrize("text", ["${path.module}", "%{ if true }x%{ endif }", "$${a}", "$%{b} $ % {", 'q"\\ü\n'])
def test_terraform_reads_a_text_as_it_was_meant(text: str, tmp_path: Path) -> None:
    (tmp_path / ROOT_FILE).write_text(json.dumps({"output": {"it": {"value": literal({text: [text]})}}}))
    terraform = find_program().path

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [terraform, *arguments], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("init", "-no-color")
    run("apply", "-no-color", "-auto-approve")
    assert json.loads(run("output", "-json"))["it"]["value"] == {text: [text]}


def test_the_distribution_carries_the_modules() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["infra"]
    carried = {path for pattern in patterns for path in (ROOT / "infra").glob(pattern)}
    needed = {path for path in MODULES.rglob("*") if path.is_file() and path.parent.name != "tests"}
    assert needed and needed <= carried
