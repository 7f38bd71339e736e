"""Structured output: the grammar that a call asks for, checked before the call is queued."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections import OrderedDict
from collections.abc import Iterator
from hashlib import sha256

import msgspec

from adapters.helper_process import HelperEnded, HelperProcess
from cluster.errors import ServiceError
from cluster.messages import Grammar
from gateway.api.schema import GenerationParams, JsonObjectFormat, JsonSchemaFormat, StructuredOutputs
from gateway.calls.grammar_process import CHECK_SECONDS, Checked
from gateway.calls.tenant_helpers import ProgramKilled, TenantHelpers
from gateway.http.errors import invalid
from gateway.places.places import Places

CHECKED = 1024
"""Number of checked grammars whose outcomes are remembered, each with a digest and a text of at most PROBLEM_CHARACTERS
(grammar_process): some megabytes at most."""
ANSWER_SECONDS = 30.0
"""Seconds to wait for one check, including the start of the process."""
ANY_OBJECT = json.dumps({"type": "object"})


class StatedForm(msgspec.Struct, frozen=True):
    """Form of an answer, and the field of the call that states it. `parts`: forms inside of it, by their fields."""

    field: str
    grammar: Grammar
    parts: dict[str, Grammar] = {}


def form_of_answer(call: GenerationParams) -> StatedForm | None:
    """Returns the form of the whole answer; None if it may have free text.

    Raises ServiceError if both fields state a form, or `structured_outputs` does not state exactly one.
    """
    stated = [
        StatedForm(*each) for each in (*_of_response_format(call), *_of_structured_outputs(call.structured_outputs))
    ]
    if (forced := call.forced_form) is not None:
        stated.append(StatedForm("tools", Grammar("json", json.dumps(forced))))
    if len(stated) > 1:
        raise invalid("structured_outputs", f"{stated[0].field} and {stated[1].field} both state a form; state one")
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
    """Checks of grammars in one gateway worker, in helper processes, with a cache of their outcomes."""

    def __init__(self, places: Places) -> None:
        """`places`: one per helper process."""
        self._helpers = TenantHelpers("gateway.calls.grammar_process", places, "the answer's form")
        self._checked: OrderedDict[bytes, str] = OrderedDict()
        """problem of each checked grammar, by its digest; a killed check has no entry"""

    def close(self) -> None:
        """Kills the helper processes, and abandons their checks."""
        self._helpers.close()

    async def check(self, tenant: str, form: StatedForm, deadline: float) -> None:
        """Raises ServiceError: `validation_failed` that names the field, and for a schema the place in it, if the
        form can't be kept; `overloaded` while it is not tried because its check was killed; `timeout` after `deadline`
        in monotonic seconds; `unavailable`."""
        try:
            problem = await self._checked_problem(tenant, form.grammar, deadline)
            if not problem:
                return
            for field, grammar in form.parts.items():
                if why := await self._checked_problem(tenant, grammar, deadline):
                    raise invalid(field, f"{field} can't be kept: {why}")
        except ProgramKilled as killed:
            problem = str(killed)
        raise invalid(form.field.split(".")[0], f"{form.field} can't be kept: {problem}")

    async def _checked_problem(self, tenant: str, grammar: Grammar, deadline: float) -> str:
        """Returns why the grammar can't be kept; an empty text if it can. Raises ProgramKilled, ServiceError."""
        key = sha256(msgspec.msgpack.encode(grammar)).digest()
        problem = self._checked.get(key)
        if problem is None:
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    program = f"{grammar.kind} {grammar.text}"
                    problem = await self._helpers.run(tenant, program, lambda helper: _problem_of(helper, grammar))
            except TimeoutError:
                raise ServiceError("timeout", "the timeout passed before the answer's form was checked") from None
        self._checked[key] = problem
        self._checked.move_to_end(key)
        while len(self._checked) > CHECKED:
            self._checked.popitem(last=False)
        return problem


def _problem_of(helper: HelperProcess, grammar: Grammar) -> str:
    """Returns why the grammar can't be kept; an empty text if it can. Blocks. Raises ProgramKilled, ServiceError."""
    try:
        checked = msgspec.msgpack.decode(helper.ask(grammar, ANSWER_SECONDS), type=Checked)
    except TimeoutError:
        why = f"this host is too busy to check the answer's form within {ANSWER_SECONDS:g} s"
        raise ServiceError("unavailable", why, retry_after=1.0) from None
    except HelperEnded as ended:
        if ended.code in (-signal.SIGKILL, -signal.SIGTERM):
            why = "the process that checks the forms of answers was ended from outside"
            raise ServiceError("unavailable", why, retry_after=1.0) from None
        limit = f"its check takes more than {CHECK_SECONDS:g} s of processor time, or too much memory"
        raise ProgramKilled(limit) from None
    if checked.last:
        helper.end()
    return checked.problem
