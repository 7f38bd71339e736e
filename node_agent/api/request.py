"""Reads and checks requests that the gateway sends to POST /generate."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import msgspec
from starlette.requests import ClientDisconnect, Request

from cluster.errors import ServiceError
from cluster.messages import GenerateRequest, Sampling, VersionMismatch, check_version

BODY_OVERHEAD = 2 << 20
"""Maximum bytes of a request in addition to its token ids; mostly stop strings."""
BYTES_PER_TOKEN = 5
"""Maximum bytes of a token id in msgpack."""
BODY_SECONDS = 10.0
STOP_LIMIT = 64
STOP_CHARACTERS = 1 << 16
"""Maximum characters of all stop strings together, since their automata are built before the first token."""
LOGPROBS_LIMIT = 64
PARAMETER_TOKENS = 1 << 16
"""Maximum token ids of one parameter, since the engine reads them at each step."""
MAX_TIMEOUT_S = 86400.0


class Limits(msgspec.Struct, frozen=True):
    """Values of config.json that limit requests. `vocab_size` counts the rows of the embedding."""

    vocab_size: int
    max_position_embeddings: int

    @property
    def body_bytes(self) -> int:
        return BODY_OVERHEAD + BYTES_PER_TOKEN * self.max_position_embeddings


class _Versioned(msgspec.Struct):
    """Protocol version of a message."""

    v: int


def read_limits(model_dir: Path) -> Limits:
    """Returns the limits from the base model's config.json. Raises OSError or msgspec.DecodeError."""
    return msgspec.json.decode((model_dir / "config.json").read_bytes(), type=Limits)


async def read_body(request: Request, limit: int, seconds: float = BODY_SECONDS) -> bytes:
    """Returns the whole body. Raises ServiceError when it is larger than `limit` bytes or too slow, or when the caller
    disconnects."""
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise ServiceError("too_large", f"the body has more than {limit} bytes")
    except TimeoutError as error:
        raise ServiceError("invalid_request", f"the body did not arrive within {seconds:g} s") from error
    except ClientDisconnect as error:
        raise ServiceError("cancelled", "the caller disconnected before the body was complete") from error
    return bytes(body)


def decode_request(body: bytes) -> GenerateRequest:
    """Returns the request of a body. Raises ServiceError: `invalid_request` for a malformed body, `unavailable` for
    another protocol version."""
    try:
        check_version(msgspec.msgpack.decode(body, type=_Versioned).v)
        return msgspec.msgpack.decode(body, type=GenerateRequest)
    except VersionMismatch as error:
        raise ServiceError("unavailable", str(error)) from error
    except msgspec.DecodeError as error:
        raise ServiceError("invalid_request", f"the body is not a GenerateRequest: {error}") from error


def check_request(request: GenerateRequest, limits: Limits, max_context: int) -> None:
    """Checks that the engine can compute the request. Raises ServiceError (`validation_failed`). Gateways normally
    refuse such requests earlier."""
    prompt = len(request.token_ids)
    _require(prompt > 0, "token_ids", "is empty")
    _require(request.max_tokens > 0, "max_tokens", "must be at least 1")
    _require(
        prompt + request.max_tokens <= max_context,
        "max_tokens",
        f"prompt ({prompt} tokens) and max_tokens ({request.max_tokens}) exceed the context of {max_context}",
    )
    _require(len(request.generated) <= request.max_tokens, "generated", "has more than max_tokens")
    for field, ids in (("token_ids", request.token_ids), ("generated", request.generated)):
        _require(
            not ids or (min(ids) >= 0 and max(ids) < limits.vocab_size),
            field,
            f"holds an id outside the vocabulary of {limits.vocab_size}",
        )
    _require(0 < request.timeout <= MAX_TIMEOUT_S, "timeout", f"must be in (0, {MAX_TIMEOUT_S:g}] seconds")
    _require(len(request.stop) <= STOP_LIMIT, "stop", f"has more than {STOP_LIMIT} strings")
    _require(all(request.stop), "stop", "holds an empty string")
    _require(
        sum(map(len, request.stop)) <= STOP_CHARACTERS, "stop", f"has more than {STOP_CHARACTERS} characters in all"
    )
    for field in ("weight", "ttft", "tpot"):
        value = getattr(request, field)
        _require(value is None or 0 < value < math.inf, field, "must be a finite number above 0")
    _check_sampling(request.sampling)
    _check_parameters(request, limits.vocab_size)


def _check_sampling(sampling: Sampling) -> None:
    _require(math.isfinite(sampling.temperature) and sampling.temperature >= 0, "temperature", "must be 0 or more")
    _require(0 < sampling.top_p <= 1, "top_p", "must be in (0, 1]")
    _require(0 <= sampling.min_p <= 1, "min_p", "must be in [0, 1]")
    _require(0 <= sampling.seed < 1 << 63, "seed", "must have at most 63 bits")
    _require(0 <= sampling.choice < 1 << 31, "choice", "must be 0 or more")
    _require(sampling.top_k >= 0, "top_k", "must be 0 or more")
    _require(math.isfinite(sampling.presence_penalty), "presence_penalty", "must be a finite number")
    _require(math.isfinite(sampling.frequency_penalty), "frequency_penalty", "must be a finite number")
    _require(
        sampling.logprobs is None or 0 <= sampling.logprobs <= LOGPROBS_LIMIT,
        "logprobs",
        f"must be between 0 and {LOGPROBS_LIMIT}",
    )


def _check_parameters(request: GenerateRequest, vocab_size: int) -> None:
    sampling = request.sampling
    _require(0 < sampling.repetition_penalty < math.inf, "repetition_penalty", "must be a finite number above 0")
    _require(0 <= sampling.min_tokens <= request.max_tokens, "min_tokens", "must be between 0 and max_tokens")
    _require(
        sampling.prompt_logprobs is None or 0 <= sampling.prompt_logprobs <= LOGPROBS_LIMIT,
        "prompt_logprobs",
        f"must be between 0 and {LOGPROBS_LIMIT}",
    )
    _require(all(map(math.isfinite, sampling.logit_bias.values())), "logit_bias", "holds a number that is not finite")
    _require(all(sampling.bad_words), "bad_words", "holds an empty word")
    _require(
        not sampling.allowed_token_ids or sampling.grammar is None, "allowed_token_ids", "can't have a grammar, too"
    )
    words = [token for word in sampling.bad_words for token in word]
    for field, ids in (
        ("logit_bias", sampling.logit_bias),
        ("stop_token_ids", sampling.stop_token_ids),
        ("allowed_token_ids", sampling.allowed_token_ids),
        ("bad_words", words),
    ):
        _require(len(ids) <= PARAMETER_TOKENS, field, f"has more than {PARAMETER_TOKENS} token ids")
        _require(
            all(0 <= token < vocab_size for token in ids), field, f"holds an id outside the vocabulary of {vocab_size}"
        )


def _require(condition: bool, param: str, problem: str) -> None:
    if not condition:
        raise ServiceError("validation_failed", f"{param} {problem}", param=param)
