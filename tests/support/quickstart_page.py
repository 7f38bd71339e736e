"""docs/guide/quickstart.md as a reader uses it: its commands, and a folder that looks like a clone."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guide" / "quickstart.md"
CALL, COMPARE, TRAIN = "Call a function", "The same tokens as PEFT", "Train one, try it on a few calls, go back"
DEPLOY = "Deploy any other"
"""Headings"""
ADAPTER = "examples/adapters/SmolLM2-135M-Instruct/json"
"""Adapter in the place of the reader's own"""
HUB = "hf:"
"""Mark of a command that needs the Hugging Face Hub"""
BLOCK = re.compile(r"^```sh\n(.*?)^```\n(?:```\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)
PYTHON = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
SAME_EVERYWHERE = re.compile(r"^(?:teas: (?:version|deleted)|teas:prod ->)")
"""Lines of the page's output that depend neither on the machine nor on the time."""


def blocks(heading: str) -> list[tuple[str, str]]:
    """Returns the commands below a heading, and what the page shows of their output."""
    _, found, rest = PAGE.read_text().partition(f"## {heading}\n")
    assert found, heading
    return BLOCK.findall(rest.partition("\n## ")[0])


def script(heading: str, port: int) -> str:
    """Returns the commands below a heading as one script, for a service on this port, without those that need the
    Hub."""
    text = "".join(commands for commands, _ in blocks(heading))
    lines = [line for line in text.splitlines(keepends=True) if HUB not in line]
    return _filled_in("".join(lines)).replace("127.0.0.1:8080", f"127.0.0.1:{port}")


def key_command() -> str:
    """Returns the command that reads the tenant's key, which later sections use."""
    (found,) = [line for commands, _ in blocks(TRAIN) for line in commands.splitlines() if line.startswith("KEY=")]
    return found


def python_scripts() -> list[str]:
    """Returns the Python of README.md and of the page; what it deploys is one of the demo's adapters."""
    found = [text for page in (ROOT / "README.md", PAGE) for text in PYTHON.findall(page.read_text())]
    assert len(found) == 3
    return [_filled_in(text) for text in found]


def lines_same_everywhere(output: str) -> list[str]:
    return [line for line in output.splitlines() if SAME_EVERYWHERE.match(line)]


def lay_out_clone(folder: Path, *more: str) -> None:
    """Links what a clone has, and further files of the root, into the folder. The service's state is in `state`."""
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / ".garnish").symlink_to("state")
    for name in ("examples", "models", *more):
        (folder / name).symlink_to(ROOT / name)


def _filled_in(text: str) -> str:
    return text.replace("path/to/adapter", ADAPTER)
