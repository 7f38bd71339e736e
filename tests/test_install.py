"""What `make up` installs suffices for what it starts, torch follows the host's GPU, and the wheel is whole."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PACKAGES = ("adapters", "cluster", "garnish", "gateway", "infra", "kernels", "node_agent")
NOT_SHIPPED = re.compile(r"infra/(container|systemd)/|infra/modules/\w+/tests/|gateway/openapi\.json$")
"""Read from a clone alone, or made anew by the program itself."""
OPTIONAL = {
    "triton": "comes with torch's CUDA build",
    "lightllm": "a runner for the papers' set-ups, with an extra of its own",
    "cuda": "of a GPU's host",
    "vllm": "of a separate environment, in which a node drives vLLM",
    "matplotlib": "plots of `garnish simulate`, which says what to install",
}


def tracked(*folders: str) -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *folders],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def installed_by(*extras: str) -> set[str]:
    """Names of the distributions that `pip install garnish[extras]` brings here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = project["dependencies"] + [line for extra in extras for line in project["optional-dependencies"][extra]]
    reached: set[tuple[str, str]] = set()
    ahead = [(Requirement(line), "") for line in lines]
    while ahead:
        need, asked = ahead.pop()
        if need.marker is not None and not need.marker.evaluate({"extra": asked}):
            continue
        name = canonicalize_name(need.name)
        for extra in {"", *need.extras} - {extra for known, extra in reached if known == name}:
            reached.add((name, extra))
            with suppress(PackageNotFoundError):
                ahead += [(Requirement(line), extra) for line in distribution(name).requires or []]
    return {name for name, _ in reached}


def imported_roots(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.partition(".")[0])
    return names


def test_make_up_installs_whatever_is_imported() -> None:
    """By the packages, and by the scripts of README and quickstart."""
    files = [name for name in tracked(*PACKAGES, "examples/models", "examples/adapters") if name.endswith(".py")]
    local = {*PACKAGES, "text", *(Path(name).stem for name in files if name.startswith("examples"))}
    roots = set().union(*(imported_roots(ROOT / name) for name in files)) - sys.stdlib_module_names - local
    owners = packages_distributions()
    brought = installed_by("node", "demo")
    if torch.version.cuda is None:
        assert "triton" not in brought, "a gigabyte that only kernels of a GPU use"
    missing = {
        root
        for root in roots - OPTIONAL.keys()
        if not {canonicalize_name(owner) for owner in owners.get(root, [])} & brought
    }
    assert not missing


STUB = """#!/bin/sh
echo "$*" >>"{log}"
case "$*" in *urlopen*) exit {unreachable} ;; esac
"""


@pytest.mark.parametrize(
    ("gpu", "reachable", "cpu_index"), [(False, True, True), (False, False, False), (True, True, False)]
)
def test_torch_follows_the_host(tmp_path: Path, gpu: bool, reachable: bool, cpu_index: bool) -> None:
    """An index that can't be reached is not named: pip would wait for it."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    log = tmp_path / "log"
    programs = {
        ".venv/bin/python": STUB.format(log=log, unreachable=int(not reachable)),
        "bin/nvidia-smi": "#!/bin/sh\n" + ("echo 'GPU 0: NVIDIA L4'" if gpu else "exit 9") + "\n",
    }
    for name, text in programs.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    done = subprocess.run(
        ["make", "install"], cwd=tmp_path, env={"PATH": path}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    (torch,) = [line for line in log.read_text().splitlines() if "torch==" in line]
    assert ("--extra-index-url https://download.pytorch.org/whl/cpu" in torch) == cpu_index
    assert "lightllm" not in log.read_text() and "dev" not in log.read_text()


def test_the_wheel_is_whole(tmp_path: Path) -> None:
    """A file that is tracked and not in the wheel would be missing on an instance of a node pool."""
    source, wheels, site = tmp_path / "source", tmp_path / "wheels", tmp_path / "site"
    files = tracked(*PACKAGES)
    for name in [*files, "pyproject.toml", "README.md", "LICENSE"]:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip"]
    quiet = ["--no-deps", "--no-index", "--quiet"]
    build = [*pip, "wheel", *quiet, "--no-build-isolation", "--wheel-dir", str(wheels), str(source)]
    subprocess.run(build, check=True, timeout=240)
    (wheel,) = wheels.glob("garnish-*-py3-none-any.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in files if not NOT_SHIPPED.search(name)} <= held
    subprocess.run(
        [*pip, "install", *quiet, "--no-compile", "--target", str(site), str(wheel)], check=True, timeout=240
    )
    environment = {"PYTHONPATH": str(site), "PATH": os.environ["PATH"]}
    where = "import garnish.cli.main as main; print(main.__file__); main.main(['--help'])"
    shown = subprocess.run(
        [sys.executable, "-c", where], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert shown.stdout.startswith(str(site)) and "invoke" in shown.stdout, shown.stderr
