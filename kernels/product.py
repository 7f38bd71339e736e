"""Compiled matrix product on a CPU, of bf16 weights with a few rows (product.cpp)."""

from __future__ import annotations

import ctypes

import torch

from kernels.build import load_library
from kernels.view import KernelArgumentError


class _Product(ctypes.Structure):
    """The C struct of one product, with fields and order as in product.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "bias", "x", "y")),
        *((name, ctypes.c_int64) for name in ("x_stride", "tokens", "d_in", "d_out", "threads")),
    )


class ProductOperator:
    """The compiled matrix product. Raises CompileError."""

    def __init__(self) -> None:
        self._run = load_library().product_bf16
        self._run.argtypes, self._run.restype = (ctypes.c_void_p,), None

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Returns x W^T + bias [T, d_out], summed in fp32 and rounded once.

        x is [T, d_in] with rows of stride 1. weight [d_out, d_in] and bias [d_out] are contiguous. All are bf16 on the
        CPU. An output row's bits depend neither on the number of threads nor on the other rows of x. Raises
        KernelArgumentError.
        """
        d_out, d_in = weight.shape
        tokens = x.shape[0]
        if x.shape != (tokens, d_in) or x.dtype is not torch.bfloat16 or (tokens and x.stride(1) != 1):
            raise KernelArgumentError(f"x is {x.dtype} {tuple(x.shape)}; bf16 [T, {d_in}] is needed")
        if weight.dtype is not torch.bfloat16 or not weight.is_contiguous():
            raise KernelArgumentError(f"the weight is {weight.dtype}; contiguous bf16 is needed")
        y = x.new_empty(tokens, d_out)
        call = _Product(
            weight=weight.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            x=x.data_ptr(),
            y=y.data_ptr(),
            x_stride=x.stride(0),
            tokens=tokens,
            d_in=d_in,
            d_out=d_out,
            threads=torch.get_num_threads(),
        )
        self._run(ctypes.byref(call))
        return y
