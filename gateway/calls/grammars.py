"""Structured output: the grammar that a call asks for, checked before the call is queued."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator

from cluster.grammars import problem_of
from cluster.messages import Grammar
from gateway.api.schema import GenerationParams, JsonObjectFormat, JsonSchemaFormat, StructuredOutputs
from gateway.catalog.threads import LeavableThreads
from gateway.http.errors import invalid

CHECKED = 1024
"""Number of checked grammars that are remembered."""
ANY_OBJECT = json.dumps({"type": "object"})


def grammar_of(call: GenerationParams) -> tuple[str, Grammar] | None:
    """Returns the field that states the answer's form, and the grammar; None if the answer may be any text.

    Raises ServiceError if both fields state a form, or `structured_outputs` does not state exactly one.
    """
    stated = [*_of_response_format(call), *_of_structured_outputs(call.structured_outputs)]
    if (forced := call.forced_form) is not None:
        stated.append(("tools", Grammar("json", json.dumps(forced))))
    if len(stated) > 1:
        raise invalid("structured_outputs", f"{stated[0][0]} and {stated[1][0]} both state a form; state one")
    if call.structured_outputs is not None and not stated:
        raise invalid("structured_outputs", "state one of json, regex, choice, grammar and json_object")
    return stated[0] if stated else None


def _of_response_format(call: GenerationParams) -> Iterator[tuple[str, Grammar]]:
    form = call.response_format
    if isinstance(form, JsonObjectFormat):
        yield "response_format", Grammar("json", ANY_OBJECT)
    if isinstance(form, JsonSchemaFormat):
        yield "response_format.json_schema.schema", Grammar("json", json.dumps(form.json_schema.schema_))


def _of_structured_outputs(stated: StructuredOutputs | None) -> Iterator[tuple[str, Grammar]]:
    if stated is None:
        return
    if stated.json is not None:
        text = stated.json if isinstance(stated.json, str) else json.dumps(stated.json)
        yield "structured_outputs.json", Grammar("json", text)
    if stated.regex is not None:
        yield "structured_outputs.regex", Grammar("regex", stated.regex)
    if stated.choice is not None:
        yield "structured_outputs.choice", Grammar("choice", json.dumps(stated.choice))
    if stated.grammar is not None:
        yield "structured_outputs.grammar", Grammar("lark", stated.grammar)
    if stated.json_object:
        yield "structured_outputs.json_object", Grammar("json", ANY_OBJECT)


class GrammarChecks:
    """Checks of grammars in one gateway worker, in threads, with a cache of what was accepted."""

    def __init__(self, threads: LeavableThreads) -> None:
        self._threads = threads
        self._accepted: OrderedDict[Grammar, None] = OrderedDict()

    async def check(self, field: str, grammar: Grammar) -> None:
        """Raises ServiceError `validation_failed` that names the field, and for a schema the place in it, if the
        grammar can't be kept."""
        if grammar not in self._accepted:
            problem = await self._threads.run(lambda: problem_of(grammar))
            if problem:
                raise invalid(field.split(".")[0], f"{field} can't be kept: {problem}")
        self._accepted[grammar] = None
        self._accepted.move_to_end(grammar)
        while len(self._accepted) > CHECKED:
            self._accepted.popitem(last=False)
