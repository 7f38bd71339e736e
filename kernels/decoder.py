"""Compiled CPU operators (decoder.cpp) for the parts of a decoder layer between its matrix products."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.build import load_library
from kernels.view import KernelArgumentError, check_tensor

SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}
PIECE = 64
"""Number of context positions in one work item, as in decoder.cpp."""
BLOCK = 32
"""Number of elements in the widest vector block. The scratch memory of a head is rounded up to a multiple of it."""
MAX_HEAD = 512


class _Layer(ctypes.Structure):
    """The C struct `Layer` of decoder.cpp. Fields and order must match it."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "values", "q_norm", "k_norm")),
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "head_dim", "block_tokens", "window")),
        *((name, ctypes.c_float) for name in ("scaling", "norm_eps")),
    )


class _Pass(ctypes.Structure):
    """The C struct `Pass` of decoder.cpp, the arguments of one forward pass. Fields and order must match it."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("cos", "sin", "slots", "table", "contexts", "scratch")),
        *((name, ctypes.c_int64) for name in ("tokens", "rows", "table_stride", "threads")),
    )


class DecoderOperators:
    """The operators for one dtype, fp32 or bf16. Raises CompileError; raises KernelArgumentError for other dtypes."""

    def __init__(self, dtype: torch.dtype) -> None:
        if dtype not in SUFFIX:
            raise KernelArgumentError(f"the compiled operators take fp32 and bf16, not {dtype}")
        self.dtype = dtype
        library, pointer, count = load_library(), ctypes.c_void_p, ctypes.c_int64
        self.attention = getattr(library, f"attention_{SUFFIX[dtype]}")
        self.attention.argtypes = (pointer, pointer, pointer, pointer)
        self._rms_norm = getattr(library, f"rms_norm_{SUFFIX[dtype]}")
        self._rms_norm.argtypes = (pointer, pointer, count, count, ctypes.c_float, pointer, count)
        self._silu_mul = getattr(library, f"silu_mul_{SUFFIX[dtype]}")
        self._silu_mul.argtypes = (pointer, count, count, pointer, count)
        for operator in (self.attention, self._rms_norm, self._silu_mul):
            operator.restype = None

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Returns weight * (x / sqrt(mean(x^2) + eps)), of x's shape and dtype (RMSNorm; Zhang and Sennrich 2019).

        x is [..., width] and weight [width]. Rounding is that of Hugging Face: the mean is fp32, and the quotient is
        rounded to x's dtype before it is multiplied.
        """
        width = weight.shape[0]
        self._check(x, width)
        out = torch.empty_like(x)
        rows, threads = x.numel() // width, torch.get_num_threads()
        self._rms_norm(x.data_ptr(), weight.data_ptr(), rows, width, eps, out.data_ptr(), threads)
        return out

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """Returns silu(x[..., :half]) * x[..., half:] for x [..., 2 * half]; silu's result is rounded to x's dtype."""
        double = x.shape[-1]
        self._check(x, double)
        out = x.new_empty(*x.shape[:-1], double // 2)
        self._silu_mul(x.data_ptr(), x.numel() // double, double // 2, out.data_ptr(), torch.get_num_threads())
        return out

    def _check(self, x: torch.Tensor, width: int) -> None:
        if x.dtype is not self.dtype or x.shape[-1] != width or not x.is_contiguous():
            raise KernelArgumentError(
                f"x is {x.dtype} {tuple(x.shape)}; contiguous {self.dtype} [..., {width}] is needed"
            )


@dataclass(frozen=True)
class Heads:
    """Shape and scaling of one layer's attention.

    `norms` has two weights [head_dim]: RMS norms that are applied to each head of q and of k before the rotation.
    `window` is the sliding window in tokens; None attends to the complete context.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scaling: float
    window: int | None = None
    norms: tuple[torch.Tensor, torch.Tensor] | None = None
    norm_eps: float = 0.0

    @property
    def covered(self) -> bool:
        """True if the compiled operator supports these heads."""
        return self.head_dim % 2 == 0 and self.head_dim <= MAX_HEAD and self.heads % self.kv_heads == 0


@dataclass(frozen=True)
class PagedCache:
    """KV cache of one layer: contiguous keys and values [slots, kv_heads, head_dim], and the shape of its heads.

    Position p of row r lies in slot block_table[r, p // block_tokens] * block_tokens + p % block_tokens.
    """

    heads: Heads
    keys: torch.Tensor
    values: torch.Tensor
    block_tokens: int


class AttentionPass:
    """Arguments of attention that all layers of a pass share. The object keeps the tensors alive for the operator.

    cos, sin     [T, head_dim], in the operators' dtype
    slots        i64[T]; a token with a slot below 0 is not written to the cache
    block_table  i32[>= R, blocks]
    contexts     i32[>= R], context lengths in tokens; context_lens has the same numbers on the host
    rows         R, the number of decode rows, which come first and have one token each

    Raises KernelArgumentError.
    """

    def __init__(
        self,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slots: torch.Tensor,
        block_table: torch.Tensor,
        contexts: torch.Tensor,
        context_lens: Sequence[int],
        rows: int,
        heads: Heads,
    ) -> None:
        tokens = slots.shape[0]
        for name, tensor, dtype, shape in (
            ("cos", cos, cos.dtype, (tokens, heads.head_dim)),
            ("sin", sin, cos.dtype, (tokens, heads.head_dim)),
            ("slots", slots, torch.int64, (tokens,)),
            ("block_table", block_table, torch.int32, tuple(block_table.shape)),
            ("contexts", contexts, torch.int32, (block_table.shape[0],)),
        ):
            check_tensor(name, tensor, dtype, shape)
        if rows > min(tokens, block_table.shape[0], len(context_lens)):
            raise KernelArgumentError(f"{rows} decode rows of {tokens} tokens and {block_table.shape[0]} block tables")
        pieces = sum(-(-context // PIECE) for context in context_lens[:rows])
        scratch = torch.empty(pieces * heads.heads * (-(-heads.head_dim // BLOCK) * BLOCK + 2))
        self.dtype, self.head_dim, self.tokens = cos.dtype, heads.head_dim, tokens
        self._tensors = (cos, sin, slots, block_table, contexts, scratch)
        self._struct = _Pass(
            *(tensor.data_ptr() for tensor in self._tensors),
            tokens=tokens,
            rows=rows,
            table_stride=block_table.shape[1],
            threads=torch.get_num_threads(),
        )
        self.address = ctypes.addressof(self._struct)


class PagedAttention:
    """Operator for a layer's rotary embedding, cache writes and decode attention. Raises KernelArgumentError."""

    def __init__(self, operators: DecoderOperators, cache: PagedCache) -> None:
        heads, keys, values = cache.heads, cache.keys, cache.values
        shape = (keys.shape[0], heads.kv_heads, heads.head_dim)
        weights = heads.norms or ()
        for name, tensor, expected in (
            ("keys", keys, shape),
            ("values", values, shape),
            *(("a head norm", weight, (heads.head_dim,)) for weight in weights),
        ):
            check_tensor(name, tensor, operators.dtype, expected)
        if not heads.covered:
            raise KernelArgumentError(
                f"{heads.heads} heads of {heads.head_dim} over {heads.kv_heads} can't be computed"
            )
        self._run, self._dtype, self.heads = operators.attention, operators.dtype, heads
        self._cache = cache
        self.width = (heads.heads + 2 * heads.kv_heads) * heads.head_dim
        q_norm, k_norm = (w.data_ptr() for w in heads.norms) if heads.norms else (None, None)
        self._struct = _Layer(
            *(keys.data_ptr(), values.data_ptr(), q_norm, k_norm),
            *(heads.heads, heads.kv_heads, heads.head_dim, cache.block_tokens, heads.window or 0),
            *(heads.scaling, heads.norm_eps),
        )
        self._address = ctypes.addressof(self._struct)

    def __call__(self, qkv: torch.Tensor, pass_: AttentionPass) -> torch.Tensor:
        """Computes attention of decode rows, and writes k and v of all tokens into the cache.

        q and k of qkv [T, width], which is contiguous, are rotated in place first. Returns [T, heads * head_dim]:
        attention's output for decode rows, uninitialised memory for other tokens. Raises KernelArgumentError.
        """
        if pass_.dtype is not self._dtype or pass_.head_dim != self.heads.head_dim:
            raise KernelArgumentError(f"the pass is of {pass_.dtype} and heads of {pass_.head_dim}, the layer is not")
        check_tensor("qkv", qkv, self._dtype, (pass_.tokens, self.width))
        out = qkv.new_empty(pass_.tokens, self.heads.heads * self.heads.head_dim)
        self._run(self._address, pass_.address, qkv.data_ptr(), out.data_ptr())
        return out
