"""Rendering of models' chat templates: conversations to text, in Jinja's sandbox. Needs neither tokenizer nor model."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from cluster.sandbox import Sandbox

ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
"""Exceptions that a template may raise when it renders messages for which it was not written."""


def compile_template(source: str) -> jinja2.Template:
    """Returns the compiled template, in the environment that chat templates expect: sandboxed, trimmed blocks, loop
    controls, and four helpers. Raises jinja2.TemplateError."""
    sandbox = Sandbox({"tojson": _tojson}, {"raise_exception": _raise, "strftime_now": _now})
    return sandbox.from_string(source)


def render(
    template: jinja2.Template, messages: Sequence[Mapping[str, Any]], special: Mapping[str, str], *, answer: bool
) -> str:
    """Returns the conversation's text. `answer`: append the prompt for the assistant's turn. `special`: texts of the
    special tokens by name. Raises an exception listed in ERRORS."""
    return template.render(messages=messages, add_generation_prompt=answer, tools=None, documents=None, **special)


def _tojson(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes HTML; templates expect plain JSON.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
