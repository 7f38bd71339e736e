"""Denormal numbers, which a CPU computes slowly, are zero in every thread that computes: each in a fresh process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from node_agent.config import EngineProcessConfig
from node_agent.cores import spare_cores
from tests.node_agent.coldstart.pools import LONG, drawn_case, hand_over, started
from tests.node_agent.served_node import node_config

DENORMAL = 1e-39

PRODUCTS = """
import torch
torch.set_num_threads(4)
CASES = {
    "elements": lambda: torch.full((1 << 22,), 1e-39) * 2.0,
    "sums": lambda: torch.full((4096, 512), 1e-41).sum(1),
    "softmax": lambda: torch.softmax(torch.tensor([[0.0, -90.0]]).repeat(1 << 18, 1), 1)[:, 1],
    "matmul": lambda: torch.full((256, 256), 1e-20) @ torch.full((256, 256), 1e-21),
    "bf16 matmul": lambda: torch.full((256, 256), 1e-20).bfloat16() @ torch.full((256, 256), 1e-21).bfloat16(),
}
def all_zero():
    found = {name: not case().float().any().item() for name, case in CASES.items()}
    try:
        from kernels.decoder import DecoderOperators
        both = torch.cat([torch.full((512, 1024), 4.0), torch.full((512, 1024), 1e-39)], 1)
        found["compiled"] = not DecoderOperators(torch.float32).silu_mul(both).any().item()
    except ImportError:
        pass
    return found
"""
ENGINE = f"""
{PRODUCTS}
import logging
import node_agent.engine_process as process
def build(*_):
    raise ValueError(str(all_zero()))
process.build_engine = build
process.main()
"""


def output_of(program: str, stdin: bytes = b"") -> str:
    done = subprocess.run([sys.executable, "-c", program], input=stdin, capture_output=True, timeout=120)
    return (done.stdout + done.stderr).decode()


def test_they_are_slow_numbers_and_no_zeros_by_default() -> None:
    """Else the next test would show nothing."""
    found = output_of(f"{PRODUCTS}\nprint(all_zero())")
    assert found.count("False") >= 5, found


def test_every_thread_of_torch_and_of_the_compiled_operators_flushes_them(tmp_path: Path) -> None:
    """The engine's process begins with that."""
    node = node_config(tmp_path, tmp_path, "http://127.0.0.1:1")
    config = EngineProcessConfig(socket="unused", engine=node.engine)
    found = output_of(ENGINE, msgspec.json.encode(config))
    assert "False" not in found and found.count("True") >= 5, found


@pytest.mark.skipif(not spare_cores(1), reason="a CPU worker needs a core beside the engine's")
def test_cpu_workers_flush_them() -> None:
    """Few tokens, by the compiled operator, and many, by torch."""
    case = drawn_case(torch.float32)
    try:
        with started(case, 1) as pool:
            for tokens in (4, 80):
                handoff = hand_over(pool, torch.full((tokens, 40), DENORMAL), 2, 0, "qkv", tokens)
                assert handoff is not None and handoff.wait(LONG)
                assert not any(y.any() for y in handoff.outputs), tokens
                handoff.close()
    finally:
        case.close()
