"""Rendering of models' chat templates: conversations to text, in Jinja's sandbox. Needs neither tokenizer nor model."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.utils import Namespace

from cluster.sandbox import PlainDict, Sandbox

ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    SyntaxError,
)
"""Exceptions that a template may raise when it is compiled, or renders messages for which it was not written."""
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning in templates; the first is the one that most templates read."""


CONTINUED = "CONTINUED_MESSAGE_ENDS_HERE "
"""Mark after the content of a message that is continued. Templates that trim a content remove its last space."""


@dataclass(frozen=True)
class ChatTemplate:
    """Compiled chat template. `variables`: names that it reads, other than `messages`, `add_generation_prompt` and the
    special tokens."""

    template: jinja2.Template
    variables: frozenset[str]


def compile_template(source: str) -> ChatTemplate:
    """Returns the compiled template, in an environment like that of transformers (render_jinja_template): sandboxed,
    with trimmed blocks, loop controls, the tag `generation`, and its filters and functions.

    Raises an exception listed in ERRORS.
    """
    functions: dict[str, Callable[..., Any]] = {
        "raise_exception": _raise,
        "strftime_now": _now,
        "dict": PlainDict(),
        "namespace": _Namespace,
    }
    sandbox = Sandbox({"tojson": _tojson}, functions, [_GenerationTag])
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
    values = {"tools": None, "documents": None, **special, **(variables or {})}
    if continues:
        messages = [*messages[:-1], {**messages[-1], "content": f"{messages[-1]['content']}{CONTINUED}"}]
    shown = [_with_reasoning(message) for message in messages]
    text = template.template.render(messages=shown, add_generation_prompt=answer, **values)
    return _until_mark(text) if continues else text


def _until_mark(text: str) -> str:
    """Returns the text before the mark. If the template has trimmed the content, the text is trimmed, too."""
    before, mark, after = text.rpartition(CONTINUED.rstrip())
    if not mark:
        raise jinja2.TemplateError("the chat template does not show the last message, so it can't be continued")
    return before if after.startswith(" ") else before.rstrip()


def _with_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the message with its reasoning under the names that templates read."""
    reasoning = next((message[name] for name in REASONING_FIELDS if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


class _GenerationTag(Extension):
    """Tag around the text of the assistant, by which trainers mask the other tokens. It changes no text."""

    tags = {"generation"}  # noqa: RUF012  (jinja declares it without ClassVar)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(Namespace):
    """Jinja's `namespace`, without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, args = args[0], args[1:]
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_attribute(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: str) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace has no attribute {name!r}: it begins with an underscore")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML; templates expect plain JSON.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
