"""The segment path against float64 products, and the table reference against the same."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.grouped import add_pieces
from kernels.reference import add_group
from kernels.view import ROW_ALIGN, GroupView

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@given(
    seed=st.integers(0, 1000),
    ranks=st.lists(st.integers(1, 33), min_size=1, max_size=3),
    d_in=st.integers(1, 70),
    begin=st.integers(0, 4),
    length=st.integers(0, 9),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_segment_equals_float64(
    seed: int, ranks: list[int], d_in: int, begin: int, length: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    tokens = begin + length + 2
    x, a = draw(tokens, d_in), draw(d_in, sum(ranks))
    ys = [draw(tokens, 5 + 3 * i) for i in range(len(ranks))]
    before = [y.clone() for y in ys]
    parts, at = [], 0
    for i, rank in enumerate(ranks):
        parts.append((i, at, at + rank, draw(rank, ys[i].shape[1]), 0.5 + i))
        at += rank
    add_pieces(ys, x, begin, begin + length, [(a, parts)])
    for i, low, high, b, scale in parts:
        want = before[i].double()
        added = scale * (x.double() @ a.double()[:, low:high] @ b.double())
        want[begin : begin + length] += added[begin : begin + length]
        size = float(want.abs().max()) + 1
        assert float((ys[i].double() - want).abs().max()) <= TOLERANCE[dtype] * size * max(ranks) ** 0.5
        outside = [t for t in range(tokens) if not begin <= t < begin + length]
        assert torch.equal(ys[i][outside], before[i][outside])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [4, 512])
def test_pieces_of_many_pages_cost_no_precision(dtype: torch.dtype, rows: int) -> None:
    """Rank 512 on two projections, in pieces of `rows` ranks: as near to float64 as in one."""
    torch.manual_seed(3)
    rank, d_in, widths = 512, 64, (48, 16)
    x = torch.randn(6, d_in).to(dtype)
    a = (torch.randn(d_in, 2 * rank) / d_in**0.5).to(dtype)
    bs = [(torch.randn(rank, width) / rank**0.5).to(dtype) for width in widths]
    ys = [torch.randn(6, width).to(dtype) for width in widths]
    wanted = [y.double() for y in ys]
    pieces = []
    for i, b in enumerate(bs):
        wanted[i][1:5] += 1.5 * (x[1:5].double() @ a[:, i * rank : (i + 1) * rank].double() @ b.double())
        for at in range(0, rank, rows):
            columns = a[:, i * rank + at : i * rank + at + rows]
            pieces.append((columns, [(i, 0, rows, b[at : at + rows], 1.5)]))
    add_pieces(ys, x, 1, 5, pieces)
    for y, want in zip(ys, wanted, strict=True):
        limit = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
        assert float((y.double() - want).abs().max() / want.abs().max()) <= limit


def test_parts_that_are_no_projection_are_refused() -> None:
    x, a, b, y = torch.ones(2, 3), torch.ones(3, 4), torch.ones(2, 5), torch.ones(2, 5)
    for parts in ([(0, 0, 2, b, 1.0), (0, 2, 4, b, 2.0)], [(0, 2, 4, b, 1.0), (0, 0, 2, b, 1.0)]):
        with pytest.raises(ValueError, match="output 0 must follow each other"):
            add_pieces([y], x, 0, 2, [(a, parts)])
    assert torch.equal(y, torch.ones(2, 5))
    add_pieces([y], x, 0, 2, [])
    assert torch.equal(y, torch.ones(2, 5))


def test_reference_reads_rows_through_the_table() -> None:
    """Two adapters with their rows scattered over the pool; a base row and a row of rank 0 stay as they are."""
    torch.manual_seed(1)
    d_in, d_out, per_unit = 20, 7, ROW_ALIGN // 4
    pool = torch.zeros(64 * per_unit)
    units = torch.randperm(32)[:8].mul(2).int()
    weights = {0: (torch.randn(3, d_in), torch.randn(3, d_out)), 2: (torch.randn(1, d_in), torch.randn(1, d_out))}
    row_offset, first, rank = [], torch.zeros(3, 2, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    for slot, (a, b) in weights.items():
        rank[slot] = a.shape[0]
        for side, matrix in enumerate((a, b)):
            first[slot, side] = len(row_offset)
            for row in matrix:
                unit = int(units[len(row_offset)])
                pool[unit * per_unit : unit * per_unit + row.shape[0]] = row
                row_offset.append(unit)
    scale = torch.tensor([2.0, 9.0, 0.5])
    x, token_slot = torch.randn(5, d_in), torch.tensor([2, -1, 0, 1, 0], dtype=torch.int32)
    y = torch.randn(5, d_out)
    want = y.clone()
    for t, slot in enumerate(token_slot.tolist()):
        if slot in weights:
            a, b = weights[slot]
            want[t] += scale[slot] * (x[t] @ a.T @ b)
    offsets = torch.tensor(row_offset, dtype=torch.int32)
    add_group([y], x, token_slot, GroupView(pool, rank[:, None], scale[:, None], first[:, None], offsets))
    torch.testing.assert_close(y, want)
    assert torch.equal(y[[1, 3]], want[[1, 3]])
