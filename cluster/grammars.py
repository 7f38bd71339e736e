"""Grammars of structured output, in the form that llguidance compiles, and checks of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from time import process_time
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from cluster.messages import Grammar

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_CHARACTERS = 1 << 16
"""Maximum length of a grammar's text."""
MAX_CHOICES = 1000
WHITESPACE = r"( |\n[ \t]{0,16})?"
"""Whitespace between the parts of a JSON text: none, a space, or a line break with indentation. Small models would
otherwise write nothing but whitespace until their limit."""
MAX_CHECKED_PARTS = 500
"""Maximum parts of a schema that are checked one by one to find the refused one."""
MAX_SEARCH_SECONDS = 0.5
"""Maximum processor time of that search."""
OPTIONS: JsonCompileOptions = {"whitespace_pattern": WHITESPACE}


def limits() -> LLParserLimits:
    """Returns the limits of llguidance: a compilation takes at most some 100 ms of processor time, and a mask some
    10 ms."""
    return LLParserLimits(
        initial_lexer_fuel=500_000, step_lexer_fuel=100_000, max_grammar_size=100_000, verbose_errors=False
    )


def compiled_form(grammar: Grammar) -> str:
    """Returns the grammar as llguidance compiles it. Raises ValueError if its text is not of its kind."""
    if grammar.kind == "json":
        return _schema_form(json.loads(grammar.text))
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "choice":
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, json.loads(grammar.text))))
    return LLMatcher.grammar_from_lark(grammar.text)


def problem_of(grammar: Grammar, tokenizer: LLTokenizer | None = None) -> str:
    """Returns why the grammar can't be kept; an empty text if it can. For a schema, the text begins with the place of
    the refused part, as a JSON pointer."""
    if len(grammar.text) > MAX_CHARACTERS:
        return f"it has {len(grammar.text)} characters; at most {MAX_CHARACTERS} are served"
    try:
        problem = LLMatcher.validate_grammar(compiled_form(grammar), tokenizer, limits=limits())
    except (ValueError, RecursionError) as error:
        return str(error)
    if problem and grammar.kind == "json":
        place, problem = _refused_part(json.loads(grammar.text), problem)
        return f"at {place or '#'}: {problem}"
    return problem


def _refused_part(schema: Any, problem: str) -> tuple[str, str]:
    """Returns the JSON pointer of the innermost part of the schema that is refused alone, and the reason."""
    place, checked, end = "", 0, process_time() + MAX_SEARCH_SECONDS
    definitions = {
        name: schema[name] for name in ("$defs", "definitions") if isinstance(schema, dict) and name in schema
    }
    part = schema
    while checked < MAX_CHECKED_PARTS:
        for step, inner in _parts(part):
            checked += 1
            alone = {**definitions, **inner} if isinstance(inner, dict) else inner
            if reason := LLMatcher.validate_grammar(_schema_form(alone), limits=limits()):
                place, problem, part = f"{place}/{step}", reason, inner
                break
            if checked >= MAX_CHECKED_PARTS or process_time() > end:
                return place, problem
        else:
            break
    return place, problem


def _schema_form(schema: Any) -> str:
    """Returns a JSON Schema, which may be true or false, as llguidance compiles it. Raises ValueError if it is
    neither a boolean nor an object."""
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=OPTIONS)


def _parts(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yields the schemas directly inside a schema, with their places in it."""
    if not isinstance(schema, dict):
        return
    for key in ("properties", "patternProperties", "$defs", "definitions"):
        for name, inner in schema[key].items() if isinstance(schema.get(key), dict) else ():
            yield f"{key}/{_escaped(name)}", inner
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        for index, inner in enumerate(schema[key]) if isinstance(schema.get(key), list) else ():
            yield f"{key}/{index}", inner
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield key, schema[key]


def _escaped(name: str) -> str:
    """Returns a property's name as a step of a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")
