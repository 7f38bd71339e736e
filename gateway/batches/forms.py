"""Forms of answers that a batch's calls state (structured output, tools), checked before the first call runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

from cluster.errors import ServiceError
from gateway.api.openai_schema import HARMLESS, ChatRequest, CompletionRequest
from gateway.api.schema import GenerationParams, InvokeRequest
from gateway.batches.messages import BatchProblem, Endpoint
from gateway.calls.request import InputProcessor
from gateway.calls.tools import conversation_of
from gateway.calls.unsupported_fields import CHAT_UNSUPPORTED, PROMPT_UNSUPPORTED, UNSUPPORTED, supported_fields
from gateway.http.bodies import convert

MAX_FORMS = 64
"""Maximum different forms of a batch that are checked before it runs. Calls with others are checked when they run."""
NONE = msgspec.Raw(b"null")


class FormFields(msgspec.Struct, frozen=True):
    """Fields of a call that state the form of its answer."""

    response_format: msgspec.Raw = NONE
    structured_outputs: msgspec.Raw = NONE
    tools: msgspec.Raw = NONE
    tool_choice: msgspec.Raw = NONE


FIELDS = FormFields.__struct_fields__


class LineForm(NamedTuple):
    """Form that a line is the first to state. `fields`: the fields as a JSON object."""

    line: int
    fields: bytes


class Forms:
    """Different forms of a batch's calls, in the order of their lines."""

    def __init__(self) -> None:
        self.lines: list[LineForm] = []
        self._digests: set[bytes] = set()

    def add(self, line: int, fields: FormFields) -> None:
        stated = {name: value for name in FIELDS if bytes(value := getattr(fields, name)) != b"null"}
        if not stated or len(self.lines) >= MAX_FORMS:
            return
        content = msgspec.json.encode(stated)
        digest = blake2b(content, digest_size=16).digest()
        if digest not in self._digests:
            self._digests.add(digest)
            self.lines.append(LineForm(line, content))


async def check_form(inputs: InputProcessor, tenant: str, endpoint: Endpoint, form: LineForm) -> BatchProblem | None:
    """Returns what is wrong with a form; None if it can be kept, or can't be checked now."""
    try:
        await inputs.check_form(tenant, _call_with(endpoint, json.loads(form.fields)))
    except ServiceError as error:
        if error.type == "validation_failed":
            return BatchProblem("invalid_form", str(error), form.line, f"body.{error.param}" if error.param else "body")
    return None


def _call_with(endpoint: Endpoint, fields: Mapping[str, Any]) -> GenerationParams:
    """Returns a call that has these fields, and whatever else it must have. Raises ServiceError."""
    if endpoint == "/v1/chat/completions":
        body = {**fields, "model": "any", "messages": [{"role": "user", "content": ""}]}
        chat = convert(supported_fields(body, UNSUPPORTED | CHAT_UNSUPPORTED, HARMLESS), ChatRequest)
        conversation_of(chat)
        return chat
    supported = supported_fields({**fields, "prompt": "any"}, UNSUPPORTED | PROMPT_UNSUPPORTED, HARMLESS)
    if endpoint == "/invoke":
        return convert(supported, InvokeRequest)
    return convert({**supported, "model": "any"}, CompletionRequest)
