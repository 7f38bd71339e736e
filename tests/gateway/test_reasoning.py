"""Reasoning is separated alike whatever parts the text comes in."""

from __future__ import annotations

import random

import pytest

from gateway.calls.reasoning import ReasoningParser
from tests.support.draws import draws

CASES = [
    ("<think>\nLet me see.\n</think>\n\nIt is 4.", False, "Let me see.", "It is 4."),
    ("Let me see.</think>It is 4.", True, "Let me see.", "It is 4."),
    ("It is 4. <think> is a tag", False, "", "It is 4. <think> is a tag"),
    (" It is 4.", False, "", " It is 4."),
    ("<think></think>4", False, "", "4"),
    ("<think>I never", False, "I never", ""),
    ("I never </thin", True, "I never </thin", ""),
    ("<thi", False, "", "<thi"),
    ("", True, "", ""),
    ("  \n <think> a < b </think> c </think> d", False, "a < b", "c </think> d"),
]


def parsed(parts: list[str], opened: bool) -> tuple[str, str]:
    parser, reasoning, content = ReasoningParser(opened=opened), "", ""
    for each in [*(parser.feed(part) for part in parts), parser.feed("", last=True)]:
        reasoning, content = reasoning + each.reasoning, content + each.content
    return reasoning, content


@pytest.mark.parametrize("seed", range(draws(10)))
def test_drawn_parts(seed: int) -> None:
    rng = random.Random(seed)
    for answer, opened, reasoning, content in CASES:
        parts, at = [], 0
        while at < len(answer):
            size = rng.choice([1, 1, 2, 5, 40])
            parts.append(answer[at : at + size])
            at += size
        assert parsed(parts, opened) == (reasoning, content), parts
