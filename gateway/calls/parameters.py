"""Resolves a call's parameters for nodes. The function's defaults replace parameters that the call leaves out.

See docs/design/decisions/generation-params.md.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, TypedDict, TypeVar

import msgspec

from adapters.functions import Defaults
from cluster.errors import ServiceError
from cluster.messages import Sampling
from cluster.text import BaseText
from gateway.api.schema import MAX_BAD_CHARACTERS, GenerationParams
from gateway.http.errors import invalid

DEFAULT_MAX_TOKENS = 256
GREEDY_BELOW = 1e-4
"""Temperature below which sampling is greedy, because dividing logits by it would overflow."""
MAX_PROMPT_LOGPROBS = 1 << 16
"""Maximum log probabilities of prompt tokens in one call's reply, including those of alternatives, over all choices."""


MAX_SEED = (1 << 63) - 1
"""Maximum seed: nodes take 63 bits, while OpenAI's seeds may be negative."""
PASSED_ON = sorted({*GenerationParams.__struct_fields__} & {*Sampling.__struct_fields__})
"""Fields that have the same name in a call and in a node's request."""

DEFAULTED = sorted({*GenerationParams.__struct_fields__} & {*Defaults.__struct_fields__})
"""Fields for which a function can have a default."""

Params = TypeVar("Params", bound=GenerationParams)


def merge(stated: Params, defaults: Defaults) -> Params:
    """Returns the call with the function's defaults filled in."""
    unset = {name: getattr(defaults, name) for name in DEFAULTED if getattr(stated, name) is None}
    return msgspec.structs.replace(stated, **unset)


def check_defaults(policy: Mapping[str, Any], text: BaseText, vocab_size: int, within: str = "") -> None:
    """Checks the defaults in a policy as those of a call. `within`: prefix of the policy's fields in errors.

    Raises ServiceError `validation_failed` for what a call would be refused for. Values of a wrong type are left to
    adapters.functions.parse_policy.
    """
    try:
        defaults = msgspec.convert(policy.get("defaults") or {}, Defaults)
    except msgspec.ValidationError:
        return
    try:
        resolve(merge(GenerationParams(), defaults), text, vocab_size)
    except ServiceError as error:
        raise invalid(f"{within}defaults.{error.param}", f"{within}defaults.{error}") from None


class NodeParameters(TypedDict):
    """Fields of a GenerateRequest that depend on the call's parameters alone. `max_tokens` also depends on the prompt,
    so it is not one of them."""

    sampling: Sampling
    stop: list[str]
    ignore_eos: bool


def resolve(merged: GenerationParams, text: BaseText, vocab_size: int) -> NodeParameters:
    """Returns the parameters of the first choice in the form that nodes accept.

    Raises ServiceError for token ids outside the vocabulary, and for too many bad words.
    """
    passed_on = {name: value for name in PASSED_ON if (value := getattr(merged, name)) is not None}
    stop_ids, allowed_ids = (
        list(dict.fromkeys(ids or [])) for ids in (merged.stop_token_ids, merged.allowed_token_ids)
    )
    check_ids(stop_ids, vocab_size, "stop_token_ids")
    check_ids(allowed_ids, vocab_size, "allowed_token_ids")
    adjusted = {
        "temperature": 0.0 if passed_on.get("temperature", 1.0) < GREEDY_BELOW else passed_on.get("temperature", 1.0),
        "top_k": max(merged.top_k or 0, 0),
        "seed": secrets.randbits(63) if merged.seed is None else merged.seed & MAX_SEED,
        "logprobs": merged.top_logprob_count,
        "logit_bias": _biases(merged.logit_bias or {}, vocab_size),
        "stop_token_ids": stop_ids,
        "allowed_token_ids": allowed_ids,
        "bad_words": _bad_words(merged.bad_words or [], text),
        "prompt_logprobs": prompt_logprobs(merged),
        "include_stop": bool(merged.include_stop_str_in_output),
    }
    sampling = Sampling(**{**passed_on, **adjusted})
    stop = [merged.stop] if isinstance(merged.stop, str) else list(merged.stop or [])
    return {"sampling": sampling, "stop": stop, "ignore_eos": bool(merged.ignore_eos)}


def prompt_logprobs(call: GenerationParams) -> int | None:
    """Returns the number of most likely tokens to report per prompt token; None if no log probabilities are requested.

    As in vLLM, `echo` requests as many for the prompt as `logprobs` does for the output.
    """
    echoed = call.top_logprob_count if call.echoes else None
    return max((k for k in (call.prompt_logprobs, echoed) if k is not None), default=None)


def max_tokens_of(merged: GenerationParams, declared: int | None, prompt: int, context: int, prompt_field: str) -> int:
    """Returns the maximum output tokens of a call.

    `declared`: the limit that the call states; None without one. `prompt`: number of prompt tokens. `context`: maximum
    tokens of prompt and output together. Raises ServiceError if prompt and output do not fit the context.
    """
    room = context - prompt
    if room < (declared or 1):
        field = prompt_field if room < 1 else merged.limit_field
        raise context_exceeded(field, context, prompt_field, prompt=prompt, output=declared or 1)
    max_tokens = min(merged.limit or DEFAULT_MAX_TOKENS, room)
    if (merged.min_tokens or 0) > max_tokens:
        why = f"min_tokens is {merged.min_tokens}, but the output may have {max_tokens} tokens (max_tokens)"
        raise invalid("min_tokens", why)
    return max_tokens


def context_exceeded(
    field: str, context: int, prompt_field: str, *, prompt: int | None = None, output: int = 1
) -> ServiceError:
    """Returns the error of a call that does not fit the context, in OpenAI's words, which clients look for.

    `field`: to be changed. `prompt` and `output`: tokens; without `prompt` the prompt alone is known to be too long.
    """
    if prompt is None:
        why, shorter = f"your {prompt_field} resulted in more than that", prompt_field
    else:
        parts = f"{prompt} in the {prompt_field}, {output} in the completion"
        why, shorter = f"you requested {prompt + output} tokens ({parts})", f"{prompt_field} or completion"
    message = (
        f"This model's maximum context length is {context} tokens. However, {why}. "
        f"Please reduce the length of the {shorter}."
    )
    return invalid(field, message, "context_length_exceeded")


def kept_prompt_tokens(merged: GenerationParams, context: int) -> int | None:
    """Returns the number of a prompt's last tokens to keep; None keeps all.

    The value -1 keeps as many as leave room for `max_tokens`; with the service's default limit at least half the
    context is kept. Raises ServiceError for a value greater than the context.
    """
    count = merged.truncate_prompt_tokens
    if count == -1:
        return max(context - (merged.limit or min(DEFAULT_MAX_TOKENS, context // 2)), 1)
    if count is not None and not 1 <= count <= context:
        why = f"truncate_prompt_tokens is {count}; it may be -1 or 1 to {context}, the context"
        raise invalid("truncate_prompt_tokens", why)
    return count


def check_prompt_logprobs(call: GenerationParams, prompt_tokens: int) -> None:
    """Raises ServiceError if the reply would have too many log probabilities of prompt tokens.

    `prompt_tokens`: number in all generations of the call.
    """
    top = prompt_logprobs(call)
    if top is not None and prompt_tokens * (top + 1) > MAX_PROMPT_LOGPROBS:
        why = f"{prompt_tokens} prompt tokens with {top + 1} log probabilities each are more than {MAX_PROMPT_LOGPROBS}"
        raise invalid("prompt_logprobs", f"{why}; ask for fewer of them")


def check_ids(token_ids: list[int], vocab_size: int, field: str) -> None:
    """Raises ServiceError for an id outside the vocabulary."""
    outside = next((token for token in token_ids if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise invalid(field, f"{field} has token id {outside}; the base model's vocabulary ends at {vocab_size - 1}")


def _biases(stated_biases: dict[str, float], vocab_size: int) -> dict[int, float]:
    for key in stated_biases:
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise invalid("logit_bias", f'logit_bias has the key {key[:40]!r}; keys are token ids such as "42"')
    biases = {int(key): value for key, value in stated_biases.items()}
    check_ids(list(biases), vocab_size, "logit_bias")
    return {token: value for token, value in biases.items() if value}


def _bad_words(words: list[str], text: BaseText) -> list[list[int]]:
    characters = sum(map(len, words))
    if characters > MAX_BAD_CHARACTERS:
        why = f"bad_words have {characters} characters; together they may have {MAX_BAD_CHARACTERS}"
        raise invalid("bad_words", why)
    blank = next((word for word in words if not word.strip()), None)
    if blank is not None:
        why = "bad_words has a word without a visible character; mask its token by logit_bias -100"
        raise invalid("bad_words", why)
    return text.encode_bad_words(words)
