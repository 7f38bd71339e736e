"""Defaults of a version from the tokenizer's files next to its adapter: chat template, end token, and added tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.types import Receive

from adapters import strict_json
from adapters.functions import MAX_TEMPLATE, OwnDefaults
from adapters.peft_config import TEMPLATE_FILE, TOKENIZER_FILE
from cluster.errors import ServiceError
from cluster.text import BaseText
from gateway.calls.chat_templates import ChatTemplates

MAX_NAMED = 5
"""Maximum number of tokens that a note names."""


async def own_defaults(
    files: Mapping[str, bytes], text: BaseText, templates: ChatTemplates, *, tenant: str, receive: Receive
) -> OwnDefaults:
    """Returns the defaults of a version, and notes about them. `files`: the tokenizer's files next to the adapter.

    What the base has too is left out. What can't be used is noted, and refuses no deploy. Raises ServiceError only if
    the template can't be checked now.
    """
    if not files:
        return OwnDefaults()
    settings, notes = _settings(files)
    template = _template(files, settings)
    problem = ""
    if template and template.strip() != text.templates.source(tools=False).strip():
        problem = await _problem(template, text, templates, tenant, receive)
    else:
        template = ""
    if problem:
        notes.append(f"the adapter's chat template is not used: {problem}")
    elif template:
        notes.append("chats with this version use the adapter's chat template, unless defaults.chat_template is set")
    stop_token_ids = _end_tokens(settings, text, notes)
    notes += _added_tokens(settings, text)
    return OwnDefaults("" if problem else template, stop_token_ids, tuple(notes))


def _settings(files: Mapping[str, bytes]) -> tuple[dict[str, Any], list[str]]:
    """Returns the content of tokenizer_config.json, empty if it is not readable; and notes."""
    data = files.get(TOKENIZER_FILE)
    if data is None:
        return {}, []
    try:
        settings = strict_json.loads(data)
    except strict_json.InvalidJson as error:
        return {}, [f"the adapter's {TOKENIZER_FILE} is not used: {error}"]
    if not isinstance(settings, dict):
        return {}, [f"the adapter's {TOKENIZER_FILE} is not used: it is no JSON object"]
    return settings, []


def _template(files: Mapping[str, bytes], settings: Mapping[str, Any]) -> str:
    """Returns the adapter's chat template; empty if it has none. Its file has priority, as in transformers."""
    data = files.get(TEMPLATE_FILE)
    if data is not None:
        return data.decode(errors="replace")
    stated = settings.get("chat_template")
    if isinstance(stated, list):
        by_name = {each.get("name"): each.get("template") for each in stated if isinstance(each, dict)}
        stated = by_name.get("default")
    return stated if isinstance(stated, str) else ""


async def _problem(template: str, text: BaseText, templates: ChatTemplates, tenant: str, receive: Receive) -> str:
    """Returns why the template can't be used; empty if it can."""
    if len(template) > MAX_TEMPLATE:
        return f"it has {len(template)} characters; {MAX_TEMPLATE} are allowed"
    policy = {"defaults": {"chat_template": template}}
    try:
        await templates.check(tenant, policy, special=text.special, receive=receive)
    except ServiceError as error:
        if error.type != "validation_failed":
            raise
        return error.message.partition(": ")[2]
    return ""


def _end_tokens(settings: Mapping[str, Any], text: BaseText, notes: list[str]) -> tuple[int, ...]:
    """Returns the adapter's end token if the base does not end with it; appends a note about it."""
    stated = settings.get("eos_token")
    token = stated.get("content") if isinstance(stated, dict) else stated
    if not isinstance(token, str) or token == text.special.get("eos_token"):
        return ()
    token_id = text.tokenizer.token_to_id(token)
    if token_id in text.eos_ids:
        return ()
    shown = repr(token[:100])
    if token_id is None:
        notes.append(f"the adapter's end token {shown} is not in the base's vocabulary: texts end with the base's")
        return ()
    notes.append(
        f"texts of this version end with the adapter's end token {shown}, too, unless defaults.stop_token_ids is set"
    )
    return (token_id,)


def _added_tokens(settings: Mapping[str, Any], text: BaseText) -> list[str]:
    """Returns a note about tokens that the adapter's tokenizer has and the base's lacks."""
    added = settings.get("added_tokens_decoder")
    if not isinstance(added, dict):
        return []
    names = [each.get("content") for each in added.values() if isinstance(each, dict)]
    unknown = [name for name in names if isinstance(name, str) and text.tokenizer.token_to_id(name) is None]
    if not unknown:
        return []
    shown = ", ".join(repr(name[:100]) for name in unknown[:MAX_NAMED])
    more = f" and {len(unknown) - MAX_NAMED} more" if len(unknown) > MAX_NAMED else ""
    return [f"the adapter's tokenizer has tokens that the base's lacks ({shown}{more}): they are plain text in prompts"]
