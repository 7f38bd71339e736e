"""Checks a base model's files before a process starts, so that the reason of a refusal is one line on the terminal."""

from __future__ import annotations

from pathlib import Path

from adapters.base_files import UnsupportedBase, pointer_problem, weight_files
from adapters.base_model import check_own_engine, read_family_config
from cluster.text import BaseText, TextError
from garnish.errors import StartError

TEXT_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
VLLM = "vllm"


def check_base(directory: Path, engine: str) -> str:
    """Checks the base model in `directory` for an engine, as the service file names it (`node.engine`).

    Returns a warning about chats, or an empty text. Raises StartError if the base can't be served.
    """
    try:
        for name in TEXT_FILES:
            problem = (directory / name).is_file() and pointer_problem(directory / name)
            if problem:
                raise UnsupportedBase(f"{directory / name}: {problem}")
        if engine != VLLM:
            check_own_engine(directory, read_family_config(directory))
        weight_files(directory)
        template_problem = BaseText(directory).template_problem
    except (UnsupportedBase, TextError, OSError) as error:
        raise StartError(f"base_model: {error}") from None
    if not template_problem:
        return ""
    return f"base_model: {template_problem}; calls with `messages` are refused, unless the function has a template"
