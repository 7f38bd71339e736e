"""A decode step of vLLM's engine on the shape that gpu_suite.py measures, where vLLM imports. Not run yet."""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts import Skipped
from tests.support.random_model import write_base

ROWS = (1, 32, 256)
TOKENS = 65
MEMORY_SHARE = 0.6
"""Of the GPU: this process has used some."""


def decode(root: Path, shape: str, until: float) -> Iterator[dict[str, Any]]:
    """Milliseconds a step of so many requests: what 64 more tokens take, through its own scheduler and graphs."""
    if find_spec("vllm") is None:
        raise Skipped("vllm is not installed")
    vllm = import_module("vllm")
    base = root / "peer"
    write_base(base, shape, 0)
    engine = vllm.LLM(
        model=str(base), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=1024,
        max_num_seqs=max(ROWS), gpu_memory_utilization=MEMORY_SHARE,
    )  # fmt: skip
    for rows in ROWS:
        prompts = [{"prompt_token_ids": [1, 2, 3, 4]}] * rows
        seconds = []
        for tokens in (TOKENS, TOKENS, 1):  # the first run prepares
            how = vllm.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
            begun = time.perf_counter()
            engine.generate(prompts, how, use_tqdm=False)
            seconds.append(time.perf_counter() - begun)
        yield {"peer": "vllm", "version": vllm.__version__, "rows": rows,
               "ms": (seconds[1] - seconds[2]) / (TOKENS - 1) * 1e3}  # fmt: skip
        if time.monotonic() > until:
            return
