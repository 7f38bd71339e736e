"""What is exchanged in Triton's language is looked through once for each launch, not by each program."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu_triton import TritonOperations
from tests.kernels.drawn import DEVICE

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="NOT RUN: kernels are compiled here, not interpreted")


def test_the_language_is_patched_for_each_launch_and_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_builtin, list[object]()
    monkeypatch.setattr(interpreter, "_patch_builtin", lambda *given: (patched.append(given[0]), patch(*given)))
    counts = []
    for rows in (1, 1, 4):
        x, out = torch.randn(rows, 20), torch.empty(rows, 20)
        patched.clear()
        TritonOperations().add_rms_norm(x, torch.ones(20), 1e-5, out=out, residual=None)
        counts.append(len(patched))
        torch.testing.assert_close(out, x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5))
    assert counts[1] == counts[2] > 0
