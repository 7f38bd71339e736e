"""Drawn sequences over a paged cache, what attention over them is in float64, and a count of what a kernel reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from kernels.decoder import Heads, PagedCache
from kernels.gpu_ops import Rows

ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Of a value, for one rounding that falls the other way"""
GARBAGE = 2**20
"""A block that is not there: where a table's row has no more blocks"""


@dataclass
class Sequences:
    """Rows whose context lies in drawn blocks of a cache that is NaN everywhere else, and their last tokens' queries.

    `queries` tokens of each row; the first row's begin behind `offset` tokens of no row.
    """

    heads: Heads
    cache: PagedCache
    rows: Rows
    contexts: list[int]
    queries: list[int]
    offset: int
    q: torch.Tensor

    @property
    def out(self) -> torch.Tensor:
        width = self.heads.heads * self.heads.head_dim
        return torch.full((self.q.shape[0], width), torch.nan, dtype=self.q.dtype, device=self.q.device)

    def expected(self) -> list[tuple[int, torch.Tensor, float]]:
        """(token, float64 [heads * head_dim], allowed error) of every token of a row."""
        h, found, token = self.heads, [], self.offset
        for row, (context, query) in enumerate(zip(self.contexts, self.queries, strict=True)):
            places = self.places(row)
            keys, values = (
                part[places].double().repeat_interleave(h.heads // h.kv_heads, dim=1)
                for part in (self.cache.keys, self.cache.values)
            )
            for i in range(query):
                seen = context - query + i + 1
                begin = max(0, seen - h.window) if h.window else 0
                q = self.q[token, : h.heads * h.head_dim].view(h.heads, h.head_dim).double()
                scores = torch.einsum("hd,phd->hp", q, keys[begin:seen]) * h.scaling
                want = torch.einsum("hp,phd->hd", scores.softmax(dim=-1), values[begin:seen])
                # weights and outputs are rounded, and an error of a score is one of its weight
                relative = 2.02 * ROUNDING[self.q.dtype] + 2e-6 * (1 + float(scores.abs().max()))
                found.append((token, want.flatten(), relative * float(values[begin:seen].abs().max())))
                token += 1
        return found

    def places(self, row: int) -> torch.Tensor:
        """i64[context]: the slots of a row."""
        at, block = torch.arange(self.contexts[row]), self.cache.block_tokens
        return self.rows.block_table[row].cpu().long()[at // block] * block + at % block


def check(found: torch.Tensor, sequences: Sequences) -> None:
    """Every token of a row is right, and no other was written."""
    expected = sequences.expected()
    for token, want, allowed in expected:
        error = (found[token].double().cpu() - want.cpu()).abs().max()
        assert float(error) <= allowed, (token, float(error), allowed)
    others = set(range(found.shape[0])) - {token for token, _, _ in expected}
    assert bool(found[sorted(others)].isnan().all())


def make_sequences(
    contexts: list[int],
    queries: list[int],
    heads: Heads,
    dtype: torch.dtype,
    block_tokens: int = 16,
    offset: int = 0,
    surplus: int = 0,
    seed: int = 0,
    device: str = "cpu",
) -> Sequences:
    """`surplus` tokens of no row at the end; q has columns behind its own, as qkv has."""
    torch.manual_seed(seed)
    needs = [-(-context // block_tokens) for context in contexts]
    order = torch.randperm(sum(needs) + 3).tolist()
    shape = (2, len(order) * block_tokens, heads.kv_heads, heads.head_dim)
    cache = torch.full(shape, torch.nan, dtype=dtype)
    table = torch.full((len(contexts), max(needs, default=0) + 1), GARBAGE, dtype=torch.int32)
    for row, (context, need) in enumerate(zip(contexts, needs, strict=True)):
        table[row, :need] = torch.tensor([order.pop() for _ in range(need)], dtype=torch.int32)
        at = torch.arange(context)
        places = table[row].long()[at // block_tokens] * block_tokens + at % block_tokens
        cache[:, places] = torch.randn(2, context, *shape[2:]).to(dtype)
    starts = torch.tensor([offset, *queries]).cumsum(0).to(torch.int32)
    q = torch.randn(int(starts[-1]) + surplus, (heads.heads + 2 * heads.kv_heads) * heads.head_dim).to(dtype)
    context_len = torch.tensor(contexts, dtype=torch.int32)
    rows = Rows(context_len.to(device), table.to(device), starts.to(device))
    kept = PagedCache(heads, cache[0].contiguous().to(device), cache[1].contiguous().to(device), block_tokens)
    return Sequences(heads, kept, rows, contexts, queries, offset, q.to(device))


@st.composite
def drawn_heads(draw: st.DrawFn, windows: tuple[int | None, ...] = (None,)) -> Heads:
    kv_heads, group, half = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(1, 40))
    return Heads(kv_heads * group, kv_heads, 2 * half, draw(st.floats(0.05, 1.0)), draw(st.sampled_from(windows)))


@contextmanager
def counted_loads(tensor: torch.Tensor) -> Iterator[list[int]]:
    """Counts, in its one element, the elements of a tensor that interpreted kernels read meanwhile."""
    from triton.runtime.interpreter import InterpreterBuilder

    begin, end, count = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, [0]
    load = InterpreterBuilder.create_masked_load

    def counting(self: Any, ptrs: Any, mask: Any, *others: Any) -> Any:
        at = ptrs.data[mask.data]
        count[0] += int(((at >= begin) & (at < end)).sum())
        return load(self, ptrs, mask, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_masked_load", counting)
        yield count
