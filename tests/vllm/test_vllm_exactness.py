"""Tokens of the real vLLM behind the node's engine against PEFT's, in fp32."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from adapters.peft_config import CONFIG_FILE
from cluster.messages import Adapter
from tests.support.draws import MANY
from tests.support.peft_reference import TIE, PeftReference
from tests.vllm.conftest import VOCAB
from tests.vllm.vllm_process import VllmProcess

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
CASES = 200 if MANY else 25
AT_ONCE = 5
FORMS = ("rank_pattern", "alpha_pattern", "use_rslora", "layers_to_transform")
MAX_TIES = 0.1
"""Share of the calls that may end in a tie, behind which nothing is compared"""


def test_the_drawn_adapters_have_all_forms(adapter_dirs: list[Path]) -> None:
    configs = [json.loads((directory / CONFIG_FILE).read_bytes()) for directory in adapter_dirs]
    assert all(any(config[form] for config in configs) for form in FORMS)
    assert len({config["r"] for config in configs}) > 4


def test_drawn_calls_get_pefts_tokens(
    vllm: VllmProcess, deployed: list[tuple[Path, Adapter]], peft: PeftReference
) -> None:
    """Batches of more adapters than there are slots, with calls of the base model among them."""
    rng, ties = random.Random(11), 0
    for _ in range(CASES // AT_ONCE):
        chosen = [None, *rng.sample(deployed, AT_ONCE - 1)]
        rng.shuffle(chosen)
        calls = []
        for each in chosen:
            prompt = [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 30))]
            count = rng.randint(4, 16)
            calls.append((each, prompt, count, vllm.submit(prompt, count, each and each[1])))
        for each, prompt, count, request in calls:
            outcome = vllm.finish(request)
            assert outcome.finished is not None and outcome.finished.reason == "length", outcome.finished
            expected = peft.greedy(each and each[0], prompt, count)
            assert len(outcome.tokens) == count
            for token, right, gap in zip(outcome.tokens, expected.tokens, expected.gaps, strict=True):
                if gap < TIE:
                    ties += 1
                    break
                assert token == right, (each and each[0].name, prompt, outcome.tokens, expected)
    assert ties <= MAX_TIES * CASES
    assert not vllm.errors()
