"""Dtypes that nodes do not compute in, against torch's own conversions; dtypes that are not served."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from peft_files import Q0, problems, read, write_tensors

from adapters.artifact import write_artifact
from adapters.base_model import BaseModel
from adapters.peft_format import read_tensor_table
from adapters.tensor_values import as_float32, read_tensor

FLOAT8 = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}


@pytest.mark.parametrize("dtype", FLOAT8)
def test_every_float8_is_the_one_of_torch(dtype: str, tmp_path: Path) -> None:
    tensor = torch.arange(256, dtype=torch.uint8).view(FLOAT8[dtype])
    safetensors.torch.save_file({"a": tensor}, tmp_path / "w")
    ref = read_tensor_table(tmp_path / "w")["a"]
    bits = read_tensor(tmp_path / "w", ref)
    assert np.array_equal(as_float32(bits, "bfloat16"), tensor.float().numpy(), equal_nan=True)
    assert np.array_equal(
        bits[tensor.float().isfinite().numpy()], tensor.bfloat16()[tensor.float().isfinite()].view(torch.uint16).numpy()
    )


@pytest.mark.parametrize(
    ("dtype", "served", "warning"),
    [
        (torch.float64, torch.float32, "float64 are served as float32, rounded once"),
        (torch.float8_e4m3fn, torch.bfloat16, "float8 are served as bfloat16, which has the same values"),
        (torch.float8_e5m2, torch.bfloat16, "float8 are served as bfloat16"),
    ],
)
def test_converted_adapters_are_those_that_torch_converts(
    dtype: torch.dtype, served: torch.dtype, warning: str, good: tuple[bytes, Path], base: BaseModel, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(5)
    tensors = {
        name: torch.randn(each.shape, generator=generator, dtype=torch.float64).to(dtype)
        for name, each in safetensors.torch.load_file(good[1]).items()
    }
    safetensors.torch.save_file(tensors, tmp_path / "w")
    safetensors.torch.save_file({name: each.to(served) for name, each in tensors.items()}, tmp_path / "plain")
    headers = []
    for name in ("w", "plain"):
        layout = read(good[0], tmp_path / name, base)
        headers.append(write_artifact(layout, base, tmp_path / name, tmp_path / f"artifact-{name}"))
        assert any(warning in each for each in layout.warnings) == (name == "w")
    assert headers[0].dtype == headers[1].dtype == str(served).removeprefix("torch.")
    assert [block.sha256 for block in headers[0].layers] == [block.sha256 for block in headers[1].layers]


def test_values_beyond_the_served_dtype_are_refused(good: tuple[bytes, Path], base: BaseModel, tmp_path: Path) -> None:
    for dtype, value in (
        (torch.float64, 1e300),
        (torch.float8_e4m3fn, float("nan")),
        (torch.float8_e5m2, float("inf")),
    ):
        tensors = {name: each.to(dtype) for name, each in safetensors.torch.load_file(good[1]).items()}
        large = torch.full(tensors[f"{Q0}.lora_A.weight"].shape, value, dtype=torch.float64)
        tensors[f"{Q0}.lora_A.weight"] = large.to(dtype)
        safetensors.torch.save_file(tensors, tmp_path / "w")
        (found,) = problems(good[0], tmp_path / "w", base)
        assert (found.tensor, found.problem) == (f"{Q0}.lora_A.weight", "holds NaN or Infinity")


def test_dtypes_that_are_not_served_are_told_in_one_line(
    good: tuple[bytes, Path], base: BaseModel, tmp_path: Path
) -> None:
    shapes = {name: each.shape for name, each in safetensors.torch.load_file(good[1]).items()}
    weights = write_tensors(
        tmp_path / "w", {name: ("I32", np.zeros(tuple(shape), np.int32)) for name, shape in shapes.items()}
    )
    (found,) = problems(good[0], weights, base)
    assert "12 tensors have a dtype that is not served" in found.problem
    assert found.found == "I32"
