"""Chat templates and special tokens of a base model directory, read as transformers reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.chat_template import ERRORS, ChatTemplate, compile_template

DEFAULT, TOOL_USE = "default", "tool_use"
"""Names of the templates that calls use; the second is for calls with tools."""
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens that templates get by name."""


@dataclass(frozen=True)
class BaseTemplates:
    """Compiled templates by name. `problem`: why the base's chats can't be served; empty if they can."""

    sources: Mapping[str, str]
    compiled: Mapping[str, ChatTemplate]
    problem: str

    def source(self, *, tools: bool) -> str:
        """Returns the source of the template for a call with or without tools; empty if the base has none."""
        return self.sources.get(self._name(tools), "")

    def template(self, *, tools: bool) -> ChatTemplate | None:
        """Returns the template for a call with or without tools; None if there is none that works."""
        return self.compiled.get(self._name(tools))

    def _name(self, tools: bool) -> str:
        return TOOL_USE if tools and TOOL_USE in self.sources else DEFAULT


def read_templates(directory: Path, settings: Mapping[str, Any]) -> BaseTemplates:
    """Returns the templates of the directory. `settings`: its tokenizer_config.json. A template that can't be used is
    reported in `problem`, and costs chats alone."""
    try:
        sources = _sources(directory, settings)
    except (OSError, ValueError, TypeError, LookupError) as error:
        return BaseTemplates({}, {}, f"the base model's chat template can't be read: {error}")
    compiled: dict[str, ChatTemplate] = {}
    problem = ""
    if sources and DEFAULT not in sources:
        problem = f"the base model has the chat templates {', '.join(sorted(sources))}, and none named {DEFAULT}"
    for name in sorted(sources.keys() & {DEFAULT, TOOL_USE}):
        try:
            compiled[name] = compile_template(sources[name])
        except ERRORS as error:
            line = getattr(error, "lineno", None)
            place = f"line {line}: " if line else ""
            reason = getattr(error, "message", None) or error  # without the lines that jinja adds
            problem = f"the base model's chat template can't be compiled: {place}{reason}"
    return BaseTemplates(sources, compiled, problem)


def _sources(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    files = {path.stem: path for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    if (directory / "chat_template.jinja").exists():
        files[DEFAULT] = directory / "chat_template.jinja"
    if files:
        sources = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    else:
        stated = settings.get("chat_template") or {}
        if isinstance(stated, list):
            stated = {entry["name"]: entry["template"] for entry in stated}
        sources = {DEFAULT: stated} if isinstance(stated, str) else dict(stated)
    return {name: source for name, source in sources.items() if source}


def special_tokens(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the texts of the special tokens by name. `settings`: the directory's tokenizer_config.json.

    Older tokenizers name some of them in special_tokens_map.json.
    """
    stated = dict(settings)
    older = directory / "special_tokens_map.json"
    if "added_tokens_decoder" not in settings and older.is_file():
        stated |= json.loads(older.read_bytes())
    return {name: _content(stated[name]) for name in SPECIAL_TOKENS if stated.get(name)}


def _content(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)
