"""A function's answers beside those of PEFT alone: what differs, and whether a tie explains it."""

from __future__ import annotations

import msgspec

from gateway.api.schema import InvokeReply, Logprob
from node_agent.peft_types import Loaded, PeftAnswer, Position

FP32_TIE = 1e-4
EPSILON = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}


class Difference(msgspec.Struct, frozen=True):
    """A token of the function's answer that is not PEFT's choice after the same tokens."""

    position: int
    """In the answer, from 0."""
    function_token: int
    peft_token: int
    behind: float
    """How far PEFT's logit of the function's token lies below its best."""
    gap: float
    """Between PEFT's two best logits."""
    tie_below: float
    """`behind` up to this is within rounding."""

    @property
    def is_tie(self) -> bool:
        return self.behind < self.tie_below


class Row(msgspec.Struct, frozen=True):
    """The comparison of one prompt's answers."""

    prompt: str
    tokens: int
    """of the function's answer"""
    differences: list[Difference]
    prompt_tokens: tuple[int, int]
    """The service's and PEFT's: unequal numbers mean that the prompts were not the same."""
    logprob_difference: float
    """The largest between the two sides' log probabilities of the same token at the same position."""
    function_seconds: float
    peft_seconds: float
    function_text: str
    peft_text: str

    @property
    def is_equal(self) -> bool:
        """Whether both sides read as many prompt tokens, and each token of the answer is PEFT's, but for ties."""
        return self.prompt_tokens[0] == self.prompt_tokens[1] and all(found.is_tie for found in self.differences)


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    function: str
    """With its version."""
    device: str
    dtype: str
    """PEFT's, and the node's if the service file is the one that it was started with."""
    equal: bool
    tokens: int
    tokens_equal: int
    ties: int
    logprob_difference: float
    function_seconds: float
    peft_seconds: float
    peft_load_seconds: float
    rows: list[Row]


def compare_row(prompt: str, reply: InvokeReply, seconds: float, answer: PeftAnswer, dtype: str) -> Row:
    listed = reply.output.logprobs or []
    return Row(
        prompt=prompt,
        tokens=len(listed),
        differences=[
            _difference(index, entry, position, dtype)
            for index, (entry, position) in enumerate(zip(listed, answer.positions, strict=True))
            if entry.token_id != position.best
        ],
        prompt_tokens=(reply.usage.prompt_tokens, answer.prompt_tokens),
        logprob_difference=max(map(_logprob_difference, listed, answer.positions), default=0.0),
        function_seconds=seconds,
        peft_seconds=answer.seconds,
        function_text=reply.output.text,
        peft_text=answer.text,
    )


def summarise(function: str, loaded: Loaded, rows: list[Row]) -> Comparison:
    return Comparison(
        function=function,
        device=loaded.device,
        dtype=loaded.dtype,
        equal=all(row.is_equal for row in rows),
        tokens=sum(row.tokens for row in rows),
        tokens_equal=sum(row.tokens - len(row.differences) for row in rows),
        ties=sum(found.is_tie for row in rows for found in row.differences),
        logprob_difference=max(row.logprob_difference for row in rows),
        function_seconds=sum(row.function_seconds for row in rows),
        peft_seconds=sum(row.peft_seconds for row in rows),
        peft_load_seconds=loaded.seconds,
        rows=rows,
    )


def tie_width(size: float, dtype: str) -> float:
    """Returns how far two logits may lie apart and be swapped by rounding: 1e-4 in float32; in half precisions a
    rounding of each side at the best logit's `size`, if that is more."""
    return max(FP32_TIE, 2 * EPSILON[dtype] * size)


def _difference(index: int, entry: Logprob, position: Position, dtype: str) -> Difference:
    return Difference(
        position=index,
        function_token=entry.token_id,
        peft_token=position.best,
        behind=position.behind,
        gap=position.gap,
        tie_below=tie_width(position.size, dtype),
    )


def _logprob_difference(entry: Logprob, position: Position) -> float:
    return max(
        (abs(item.logprob - other) for item, other in zip(entry.top, position.logprobs, strict=True)), default=0.0
    )
