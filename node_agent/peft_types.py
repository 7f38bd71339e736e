"""Messages to and from the process that runs PEFT alone. No torch here: the command line imports it."""

from __future__ import annotations

from typing import Any

import msgspec


class PeftPrompt(msgspec.Struct, frozen=True):
    """A prompt, and what the function answered: exactly one of `text` and `messages`."""

    text: str | None
    messages: list[dict[str, Any]] | None
    tokens: list[int]
    """The function's token ids, an end token included."""
    top: list[list[int]]
    """Per token, the ids whose log probabilities are asked for: those that the function's reply listed."""


class PeftJob(msgspec.Struct, frozen=True, kw_only=True):
    parent: int
    """Process that the work ends with."""
    model_dir: str
    adapter_dir: str
    device: str
    dtype: str
    """Name of a dtype, as in serverless.yml: `auto` is the model's own."""
    max_tokens: int
    prompts: list[PeftPrompt]


class Position(msgspec.Struct, frozen=True):
    """PEFT's logits after the prompt and the function's tokens up to here, float32."""

    best: int
    """Token id of the largest."""
    gap: float
    """Difference of the two largest logits."""
    behind: float
    """Difference of the largest logit and that of the function's token; 0: it is the largest."""
    size: float
    """The largest one's magnitude, which rounding goes by."""
    logprobs: list[float]
    """Log probabilities of the ids that were asked for."""


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    device: str
    dtype: str
    """float32, float16 or bfloat16"""
    seconds: float


class PeftAnswer(msgspec.Struct, frozen=True, tag="answer"):
    prompt_tokens: int
    tokens: list[int]
    """Tokens that PEFT writes by itself, greedily."""
    text: str
    seconds: float
    """Duration of `tokens`."""
    positions: list[Position]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    message: str


PeftMessage = Loaded | PeftAnswer | Failed
