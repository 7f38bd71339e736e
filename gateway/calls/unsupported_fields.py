"""Fields of other services that this one does not support.

They are accepted with a value that has no effect, and otherwise refused by name.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from cluster.errors import ServiceError
from gateway.calls.neutral_fields import without_neutral
from gateway.http.errors import invalid

DOCS = "docs/guide/invoke.md#what-other-services-have"


class Unsupported(NamedTuple):
    """Unsupported field of a request. `neutral`: values that have no effect, which are accepted. `instead`: the nearest
    supported alternative."""

    neutral: tuple[Any, ...]
    instead: str


_TEXT_ONLY = "answers are text"
_TEXT_ONLY_INPUT = "the base reads text alone"
_STRUCTURED = "use structured_outputs, or response_format"
_CHOICES = "use n, which returns all choices, and choose by logprobs"
_SAMPLING = "use temperature, top_p, top_k and n"
_TOOLS = "use tools and tool_choice on /v1/chat/completions"

UNSUPPORTED: dict[str, Unsupported] = {
    "audio": Unsupported((None,), _TEXT_ONLY),
    "best_of": Unsupported((None, 1), _CHOICES),
    "chat_template": Unsupported((None,), "set defaults.chat_template in the function's policy"),
    "chat_template_content_format": Unsupported((None, "auto", "string"), "templates get a message's content as text"),
    "detokenize": Unsupported((None, True), "leave it out: answers have their text"),
    "documents": Unsupported((None, []), "use chat_template_kwargs with documents"),
    "early_stopping": Unsupported((None, False), _SAMPLING),
    "function_call": Unsupported((None, "none"), _TOOLS),
    "functions": Unsupported((None, []), _TOOLS),
    "guided_choice": Unsupported((None,), _STRUCTURED),
    "guided_decoding_backend": Unsupported((None,), _STRUCTURED),
    "guided_grammar": Unsupported((None,), _STRUCTURED),
    "guided_json": Unsupported((None,), _STRUCTURED),
    "guided_regex": Unsupported((None,), _STRUCTURED),
    "kv_transfer_params": Unsupported((None,), "a node computes prompts and answers itself"),
    "length_penalty": Unsupported((None, 1.0, 1), _SAMPLING),
    "logits_processors": Unsupported((None,), "use logit_bias, bad_words, allowed_token_ids or structured_outputs"),
    "mm_processor_kwargs": Unsupported((None,), _TEXT_ONLY_INPUT),
    "modalities": Unsupported((None, ["text"]), _TEXT_ONLY),
    "moderation": Unsupported((None,), "check the text in the caller"),
    "prediction": Unsupported((None,), "leave it out: it would change the speed alone"),
    "priority": Unsupported((None, 0), "the function's slo_class says which calls go first"),
    "return_tokens_as_token_ids": Unsupported((None, False), "use return_token_ids"),
    "suffix": Unsupported((None, ""), "put what comes after into the prompt"),
    "use_beam_search": Unsupported((None, False), _SAMPLING),
    "verbosity": Unsupported((None, "medium"), "use max_tokens"),
    "web_search_options": Unsupported((None,), "put what was found into the prompt"),
}
PROMPT_UNSUPPORTED = {
    "reasoning_effort": Unsupported((None, "none"), "use it on /v1/chat/completions"),
    "tool_choice": Unsupported((None, "none", "auto"), _TOOLS),
    "tools": Unsupported((None, []), _TOOLS),
}
"""Fields that are served on /v1/chat/completions only."""
CHAT_UNSUPPORTED = {
    "echo": Unsupported((None, False), "use /v1/completions, or prompt_logprobs"),
}


ROLES = {"function": "use the role tool, with tool_call_id"}
PARTS = dict.fromkeys(
    ("image_url", "input_image", "image", "input_audio", "audio_url", "video_url", "file"),
    "the base reads text alone: say in words what it is to know",
)
"""Unsupported roles of messages, and unsupported kinds of content parts."""


def supported_fields(body: Any, unsupported: dict[str, Unsupported], ignored: tuple[str, ...] = ()) -> Any:
    """Returns the body without fields that ask for nothing. Raises ServiceError if an unsupported one would have an
    effect."""
    if not isinstance(body, dict):
        return body
    body = without_neutral(body)
    for field in unsupported.keys() & body.keys():
        neutral, instead = unsupported[field]
        # 1 == True in Python, but not in JSON.
        if not any(body[field] == value and type(body[field]) is type(value) for value in neutral):
            raise _refusal(field, field, instead, "unsupported_parameter")
    if body.get("max_tokens") == 0 and body["max_tokens"] is not False:
        raise _refusal(
            "max_tokens 0", "max_tokens", "to score a prompt use 1, with prompt_logprobs, or echo and logprobs"
        )
    _check_messages(body.get("messages"))
    return {field: value for field, value in body.items() if field not in unsupported and field not in ignored}


def _check_messages(messages: Any) -> None:
    """Raises ServiceError for unsupported roles and content parts. Messages of a wrong type are refused later."""
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        if not isinstance(message, dict):
            continue
        role, content, where = message.get("role"), message.get("content"), f"messages[{index}]"
        if isinstance(role, str) and role in ROLES:
            raise _refusal(f"role {role}", f"{where}.role", ROLES[role])
        for at, part in enumerate(content if isinstance(content, list) else ()):
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind in PARTS:
                raise _refusal(kind, f"{where}.content[{at}].type", PARTS[kind])


def _refusal(what: str, param: str, instead: str, openai_code: str = "unsupported_value") -> ServiceError:
    return invalid(param, f"{what} is not served; {instead} ({DOCS})", openai_code)
