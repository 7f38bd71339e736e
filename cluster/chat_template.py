"""Rendering of models' chat templates: conversations to text, in Jinja's sandbox. Needs neither tokenizer nor model."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from jinja2.meta import find_undeclared_variables

from cluster.sandbox import Sandbox

ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""Exceptions that a template may raise when it renders messages for which it was not written."""


CONTINUED = "CONTINUED_MESSAGE_ENDS_HERE "
"""Mark after the content of a message that is continued. Templates that trim a content remove its last space."""


@dataclass(frozen=True)
class ChatTemplate:
    """Compiled chat template. `variables`: names that it reads, other than `messages`, `add_generation_prompt` and the
    special tokens."""

    template: jinja2.Template
    variables: frozenset[str]


def compile_template(source: str) -> ChatTemplate:
    """Returns the compiled template, in the environment that chat templates expect: sandboxed, trimmed blocks, loop
    controls, and four helpers. Raises jinja2.TemplateError."""
    sandbox = Sandbox({"tojson": _tojson}, {"raise_exception": _raise, "strftime_now": _now})
    names = find_undeclared_variables(sandbox.parse(source)) - {"messages", "add_generation_prompt"}
    return ChatTemplate(sandbox.from_string(source), frozenset(name for name in names if not name.endswith("_token")))


def render(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    special: Mapping[str, str],
    *,
    answer: bool,
    continues: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Returns the conversation's text.

    `answer`: append the prompt for the assistant's turn. `continues`: end the text after the last message's content, as
    transformers' `continue_final_message` does. `special`: texts of the special tokens by name. `variables`:
    further values for the template, such as `tools`. Raises an exception listed in ERRORS, also for a variable that the
    template does not read.
    """
    for name in sorted((variables or {}).keys() - template.variables):
        has = f"it reads {', '.join(sorted(template.variables))}" if template.variables else "it reads no variables"
        raise jinja2.TemplateError(f"the chat template does not read {name}; {has}")
    values = {"tools": None, "documents": None, **(variables or {}), **special}
    if continues:
        messages = [*messages[:-1], {**messages[-1], "content": f"{messages[-1]['content']}{CONTINUED}"}]
    text = template.template.render(messages=messages, add_generation_prompt=answer, **values)
    return _until_mark(text) if continues else text


def _until_mark(text: str) -> str:
    """Returns the text before the mark. If the template has trimmed the content, the text is trimmed, too."""
    before, mark, after = text.rpartition(CONTINUED.rstrip())
    if not mark:
        raise jinja2.TemplateError("the chat template does not show the last message, so it can't be continued")
    return before if after.startswith(" ") else before.rstrip()


def _tojson(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes HTML; templates expect plain JSON.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
