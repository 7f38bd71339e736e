"""docs/guide/llama-3.1-8b.md and its service files."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from garnish.config import ServiceFile, load_service_file

PAGE = (Path(__file__).parents[2] / "docs" / "guide" / "llama-3.1-8b.md").read_text()


def llama_services() -> list[ServiceFile]:
    """Returns the page's service files in order: our engine, vLLM, vLLM in FP8, vLLM on two GPUs."""
    with tempfile.TemporaryDirectory() as folder:
        services = []
        for number, text in enumerate(re.findall(r"^```yaml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)):
            file = Path(folder) / f"{number}.yml"
            file.write_text(text)
            services.append(load_service_file(file))
        return services
