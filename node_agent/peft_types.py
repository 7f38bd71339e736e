"""Messages to and from the process that runs PEFT. Does not import torch, since the command line imports it."""

from __future__ import annotations

from typing import Any

import msgspec


class PeftPrompt(msgspec.Struct, frozen=True):
    """Prompt and the function's answer to it. Exactly one of `text` and `messages` is set."""

    text: str | None
    messages: list[dict[str, Any]] | None
    tokens: list[int]
    """token ids of the function's answer, including an end token"""
    top: list[list[int]]
    """token ids whose log probabilities are requested, for each token of the answer: those listed in the function's
    reply"""


class PeftJob(msgspec.Struct, frozen=True, kw_only=True):
    """Work for the process that runs PEFT."""

    parent: int
    """process id of the parent; the work ends when the parent exits"""
    model_dir: str
    adapter_dir: str
    device: str
    dtype: str
    """name of a dtype as in serverless.yml; `auto` is the dtype in the model's files"""
    max_tokens: int
    prompts: list[PeftPrompt]


class Position(msgspec.Struct, frozen=True):
    """Logits of PEFT (float32) after the prompt and the function's tokens before this position."""

    best: int
    """token id with the largest logit"""
    gap: float
    """difference between the two largest logits"""
    behind: float
    """difference between the largest logit and that of the function's token; 0 if they are the same"""
    size: float
    """absolute value of the largest logit, to which rounding errors are proportional"""
    logprobs: list[float]
    """log probabilities of the token ids that `PeftPrompt.top` requests for this position"""


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """Message after the model and the adapter are loaded. `seconds`: duration of loading."""

    device: str
    dtype: str
    """float32, float16 or bfloat16"""
    seconds: float


class PeftAnswer(msgspec.Struct, frozen=True, tag="answer"):
    """Result of PEFT for one prompt."""

    prompt_tokens: int
    tokens: list[int]
    """tokens that PEFT generates greedily"""
    text: str
    seconds: float
    """seconds for generating `tokens`"""
    positions: list[Position]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Message that ends a failed job."""

    message: str


PeftMessage = Loaded | PeftAnswer | Failed
