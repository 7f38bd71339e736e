"""How a call's parameters become numbers of tokens."""

from __future__ import annotations

import pytest

from gateway.api.schema import GenerationParams
from gateway.calls.parameters import DEFAULT_MAX_TOKENS, kept_prompt_tokens, max_tokens_of


@pytest.mark.parametrize(
    ("stated", "context", "kept", "output"),
    [(None, 2048, 2048 - DEFAULT_MAX_TOKENS, DEFAULT_MAX_TOKENS), (None, 100, 50, 50), (12, 512, 500, 12)],
)
def test_truncating_a_prompt_leaves_room_for_the_output(
    stated: int | None, context: int, kept: int, output: int
) -> None:
    options = GenerationParams(truncate_prompt_tokens=-1, max_tokens=stated)
    assert kept_prompt_tokens(options, context) == kept
    assert max_tokens_of(options, stated, kept, context, "prompt") == output
