"""A call's parameters: what it states, over the function's defaults, as nodes take them."""

from __future__ import annotations

from typing import Any

import msgspec

from adapters.functions import Defaults
from cluster.errors import ServiceError
from cluster.messages import Sampling
from cluster.text import BaseText
from gateway.api.schema import MAX_BAD_CHARACTERS, GenerationParams

DEFAULT_MAX_TOKENS = 256
GREEDY_BELOW = 1e-4
"""A temperature under this divides logits into infinities; it means greedy."""
MAX_PROMPT_LOGPROBS = 1 << 16
"""Log probabilities of prompt tokens that one call may ask for, alternatives and choices counted."""


class Options(GenerationParams, frozen=True, kw_only=True):
    """What a call states of its own; None where it states nothing."""

    logprobs: int | None = None
    echo: bool = False
    max_tokens_field: str = "max_tokens"
    """How the caller calls it."""


def stated(call: GenerationParams) -> dict[str, Any]:
    """The parameters that all routes have, as arguments of Options."""
    return {field: getattr(call, field) for field in GenerationParams.__struct_fields__}


def merge(options: Options, defaults: Defaults) -> Options:
    """The call's own values, then the function's."""
    unset = {name: getattr(defaults, name) for name in defaults.__struct_fields__ if getattr(options, name) is None}
    return msgspec.structs.replace(options, **unset)


def sampling_of(merged: Options, seed: int, text: BaseText, vocab_size: int) -> Sampling:
    """Of the first choice. Raises ServiceError for token ids that the base model has not, or too many bad words."""
    temperature = 1.0 if merged.temperature is None else merged.temperature
    stop_ids = list(dict.fromkeys(merged.stop_token_ids or []))
    check_ids(stop_ids, vocab_size, "stop_token_ids")
    return Sampling(
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_p=1.0 if merged.top_p is None else merged.top_p,
        top_k=max(merged.top_k or 0, 0),
        min_p=merged.min_p or 0.0,
        seed=seed,
        presence_penalty=merged.presence_penalty or 0.0,
        frequency_penalty=merged.frequency_penalty or 0.0,
        logprobs=merged.logprobs,
        repetition_penalty=1.0 if merged.repetition_penalty is None else merged.repetition_penalty,
        logit_bias=_biases(merged.logit_bias or {}, vocab_size),
        min_tokens=merged.min_tokens or 0,
        stop_token_ids=stop_ids,
        bad_words=_bad_words(merged.bad_words or [], text),
        prompt_logprobs=prompt_logprobs(merged),
        skip_special_tokens=merged.skip_special_tokens is not False,
        include_stop=bool(merged.include_stop_str_in_output),
    )


def prompt_logprobs(options: Options) -> int | None:
    """How many of the likeliest tokens are wanted at each of the prompt's tokens. As in vLLM, `echo` wants as many as
    `logprobs`. None: no log probabilities of the prompt."""
    echoed = options.logprobs if options.echo else None
    return max((k for k in (options.prompt_logprobs, echoed) if k is not None), default=None)


def max_tokens_of(merged: Options, declared: int | None, prompt: int, context: int, prompt_field: str) -> int:
    """`declared`: the call's own; `prompt`: its tokens. Raises ServiceError when they don't fit the context."""
    left = context - prompt
    if left < 1:
        raise ServiceError(
            "validation_failed",
            f"the prompt has {prompt} tokens, and prompt and output together may have {context}",
            param=prompt_field,
        )
    if declared is not None and declared > left:
        raise ServiceError(
            "validation_failed",
            f"max_tokens is {declared}, but the prompt of {prompt} tokens leaves {left} of the context of {context}",
            param=merged.max_tokens_field,
        )
    most = min(merged.max_tokens or DEFAULT_MAX_TOKENS, left)
    if (merged.min_tokens or 0) > most:
        why = f"min_tokens is {merged.min_tokens}, but the output may have {most} tokens (max_tokens)"
        raise ServiceError("validation_failed", why, param="min_tokens")
    return most


def kept_tokens(merged: Options, context: int) -> int | None:
    """How many of a prompt's last tokens are kept; None: all. -1 keeps what leaves room for `max_tokens`; for the
    service's default of it no more than half the context is left.

    Raises ServiceError when it is more than the context.
    """
    kept = merged.truncate_prompt_tokens
    if kept == -1:
        return max(context - (merged.max_tokens or min(DEFAULT_MAX_TOKENS, context // 2)), 1)
    if kept is not None and not 1 <= kept <= context:
        why = f"truncate_prompt_tokens is {kept}; it may be -1 or 1 to {context}, the context"
        raise ServiceError("validation_failed", why, param="truncate_prompt_tokens")
    return kept


def check_prompt_logprobs(options: Options, prompt_tokens: int) -> None:
    """`prompt_tokens`: of all generations of the call. Raises ServiceError for more than a reply should hold."""
    top = prompt_logprobs(options)
    if top is not None and prompt_tokens * (top + 1) > MAX_PROMPT_LOGPROBS:
        why = f"{prompt_tokens} prompt tokens with {top + 1} log probabilities each are more than {MAX_PROMPT_LOGPROBS}"
        raise ServiceError("validation_failed", f"{why}; ask for fewer of them", param="prompt_logprobs")


def stops_of(stop: list[str] | str | None) -> list[str]:
    return [stop] if isinstance(stop, str) else list(stop or [])


def check_ids(token_ids: list[int], vocab_size: int, field: str) -> None:
    """Raises ServiceError for an id outside the vocabulary."""
    outside = next((token for token in token_ids if not 0 <= token < vocab_size), None)
    if outside is not None:
        why = f"{field} has token id {outside}; the base model's vocabulary ends at {vocab_size - 1}"
        raise ServiceError("validation_failed", why, param=field)


def _biases(stated_biases: dict[str, float], vocab_size: int) -> dict[int, float]:
    for key in stated_biases:
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            why = f'logit_bias has the key {key[:40]!r}; keys are token ids such as "42"'
            raise ServiceError("validation_failed", why, param="logit_bias")
    biases = {int(key): value for key, value in stated_biases.items()}
    check_ids(list(biases), vocab_size, "logit_bias")
    return {token: value for token, value in biases.items() if value}


def _bad_words(words: list[str], text: BaseText) -> list[list[int]]:
    characters = sum(map(len, words))
    if characters > MAX_BAD_CHARACTERS:
        why = f"bad_words have {characters} characters; together they may have {MAX_BAD_CHARACTERS}"
        raise ServiceError("validation_failed", why, param="bad_words")
    blank = next((word for word in words if not word.strip()), None)
    if blank is not None:
        why = "bad_words has a word without a visible character; mask its token by logit_bias -100"
        raise ServiceError("validation_failed", why, param="bad_words")
    return text.encode_bad_words(words)
