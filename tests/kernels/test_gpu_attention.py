"""Paged attention against float64, in Triton's interpreter where there is no GPU, and in plain torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.decoder import Heads
from kernels.gpu_ops import MIN_PIECE, LayerOperations, Rows, decode_scratch, decode_splits
from kernels.gpu_reference import TorchOperations
from kernels.gpu_triton import TritonOperations
from kernels.view import KernelArgumentError
from tests.kernels.drawn import DEVICE
from tests.kernels.paged import GARBAGE, Sequences, check, counted_loads, drawn_heads, make_sequences
from tests.support.draws import draws

BOTH = [TritonOperations(), TorchOperations()]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
WINDOWS = (None, 1, 40, 100)


def decode(operations: LayerOperations, drawn: Sequences, splits: int) -> torch.Tensor:
    rows, out = Rows(drawn.rows.context_len, drawn.rows.block_table), drawn.out
    scratch = torch.full(
        (splits, len(drawn.contexts), drawn.heads.heads, drawn.heads.head_dim + 2), torch.nan, device=DEVICE
    )
    operations.decode_attention(drawn.q, drawn.cache, rows, out=out, scratch=scratch)
    return out


def decode_rows(
    contexts: list[int], heads: Heads, dtype: torch.dtype, block_tokens: int = 16, seed: int = 0
) -> Sequences:
    """A token per row."""
    return make_sequences(contexts, [1] * len(contexts), heads, dtype, block_tokens, seed=seed, device=DEVICE)


@pytest.mark.parametrize("operations", BOTH)
@settings(max_examples=draws(6))
@given(
    contexts=st.lists(st.integers(1, 300), min_size=1, max_size=2),
    padding=st.integers(0, 1),
    heads=drawn_heads(WINDOWS),
    dtype=st.sampled_from(DTYPES),
    block_tokens=st.integers(1, 20),
    splits=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_decode(
    operations: LayerOperations,
    contexts: list[int],
    padding: int,
    heads: Heads,
    dtype: torch.dtype,
    block_tokens: int,
    splits: int,
    seed: int,
) -> None:
    padded = add_padding(decode_rows(contexts, heads, dtype, block_tokens, seed), padding)
    check(decode(operations, padded, splits), padded)


def add_padding(drawn: Sequences, padding: int) -> Sequences:
    """Adds so many rows of context 0 at the end, whose tables and queries are garbage."""
    table, context_len = drawn.rows.block_table, drawn.rows.context_len
    more = table.new_full((padding, table.shape[1]), GARBAGE)
    rows = Rows(torch.cat((context_len, context_len.new_zeros(padding))), torch.cat((table, more)))
    q = torch.cat((drawn.q, drawn.q.new_full((padding, drawn.q.shape[1]), torch.nan)))
    queries, contexts = drawn.queries + [0] * padding, drawn.contexts + [0] * padding
    return Sequences(drawn.heads, drawn.cache, rows, contexts, queries, 0, q)


@pytest.mark.parametrize("operations", BOTH)
@pytest.mark.parametrize("window", [None, 2 * MIN_PIECE + 5])
def test_decode_in_several_pieces(operations: LayerOperations, window: int | None) -> None:
    """Contexts just below and above a piece, two, and all pieces full."""
    heads = Heads(4, 2, 16, 0.3, window)
    drawn = decode_rows([MIN_PIECE - 1, MIN_PIECE + 1, 2 * MIN_PIECE, 4 * MIN_PIECE + 9], heads, torch.bfloat16)
    check(decode(operations, drawn, 3), drawn)


@pytest.mark.parametrize(
    ("width", "dtype", "window"),
    [(64, DTYPES[2], None), (80, DTYPES[0], 20), (96, DTYPES[1], 20), (128, DTYPES[2], 20), (256, DTYPES[0], None)],
)
def test_heads_of_real_models(width: int, dtype: torch.dtype, window: int | None) -> None:
    """Eight query heads for a key head; contexts of one token, up to a block's edge and behind it, beside padding."""
    heads = Heads(8, 1, width, width**-0.5, window)
    decoded = add_padding(decode_rows([1, 16, 17, MIN_PIECE + 1], heads, dtype), 1)
    check(decode(TritonOperations(), decoded, 2), decoded)
    chunks = make_sequences([1, 16, 80], [1, 16, 40], heads, dtype, device=DEVICE)
    out = chunks.out
    TritonOperations().prefill_attention(chunks.q, chunks.cache, chunks.rows, out=out)
    check(out, chunks)


def test_a_row_has_the_same_bits_beside_any_others() -> None:
    heads = Heads(6, 2, 24, 0.3)
    drawn = decode_rows([150, 20], heads, torch.bfloat16)
    found = decode(TritonOperations(), drawn, 2)
    for row in range(2):
        rows = Rows(drawn.rows.context_len[row : row + 1], drawn.rows.block_table[row : row + 1])
        alone = Sequences(heads, drawn.cache, rows, drawn.contexts[row : row + 1], [1], 0, drawn.q[row : row + 1])
        assert torch.equal(decode(TritonOperations(), alone, 2)[0], found[row])


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy computes in the interpreter
def test_a_bad_number_stays_in_its_row_and_shows_there() -> None:
    drawn = decode_rows([70, 70], Heads(2, 1, 16, 0.3), torch.float32)
    clean = decode(TritonOperations(), drawn, 1)
    drawn.cache.keys[drawn.places(1)[3]] = torch.nan
    found = decode(TritonOperations(), drawn, 1)
    assert torch.equal(found[0], clean[0]) and bool(found[1].isnan().all())


@pytest.mark.skipif(DEVICE == "cuda", reason="NOT RUN: what a kernel reads is seen in the interpreter alone")
def test_decode_reads_a_context_once() -> None:
    """However many query heads share it; and of a window, what is in it alone."""
    for window, positions in ((None, 150 + 20), (30, 30 + 20)):
        drawn = decode_rows([150, 20], Heads(6, 2, 24, 0.3, window), torch.float32)
        with counted_loads(drawn.cache.keys) as keys, counted_loads(drawn.cache.values) as values:
            decode(TritonOperations(), drawn, 2)
        assert keys == values == [positions * 2 * 24]


@pytest.mark.parametrize("operations", BOTH)
@settings(max_examples=draws(5))
@given(
    lengths=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 90)), min_size=1, max_size=2),
    around=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    heads=drawn_heads(WINDOWS),
    dtype=st.sampled_from(DTYPES),
    block_tokens=st.integers(1, 20),
    seed=st.integers(0, 99),
)
def test_prefill(
    operations: LayerOperations,
    lengths: list[tuple[int, int]],
    around: tuple[int, int],
    heads: Heads,
    dtype: torch.dtype,
    block_tokens: int,
    seed: int,
) -> None:
    """Rows of (earlier context, tokens of the chunk), some without tokens, some without anything."""
    contexts, queries = [a + b for a, b in lengths], [b for _, b in lengths]
    drawn = make_sequences(contexts, queries, heads, dtype, block_tokens, *around, seed=seed, device=DEVICE)
    out = drawn.out
    operations.prefill_attention(drawn.q, drawn.cache, drawn.rows, out=out)
    check(out, drawn)


@pytest.mark.parametrize("operations", BOTH)
def test_prefill_of_more_rows_than_are_looked_at_at_a_time(operations: LayerOperations) -> None:
    drawn = make_sequences([3] * 34, [1, 0] * 17, Heads(1, 1, 4, 0.5), torch.float32, 4, offset=2, device=DEVICE)
    out = drawn.out
    operations.prefill_attention(drawn.q, drawn.cache, drawn.rows, out=out)
    check(out, drawn)


def test_splits_fill_a_gpu_and_no_more() -> None:
    heads = Heads(32, 8, 128, 0.1)
    assert decode_splits(1, 8, 8192) == 32
    assert decode_splits(1, 8, 8 * MIN_PIECE) == 8
    assert decode_splits(256, 8, 8192) == 1
    assert decode_scratch(16, heads, 8192, torch.device("cpu")).shape == (4, 16, 32, 130)


@pytest.mark.parametrize("operations", BOTH)
def test_refuses_what_it_cannot_take(operations: LayerOperations) -> None:
    heads = Heads(4, 2, 8, 0.3)
    drawn = decode_rows([5, 7], heads, torch.float32)
    rows, q, cache, out = Rows(drawn.rows.context_len, drawn.rows.block_table), drawn.q, drawn.cache, drawn.out
    scratch = torch.empty(1, 2, 4, 10, device=DEVICE)
    with pytest.raises(KernelArgumentError, match=r"out is torch\.float32 \(1, 32\)"):
        operations.decode_attention(q, cache, rows, out=out[:1], scratch=scratch)
    with pytest.raises(KernelArgumentError, match="33 splits; 1 to 32"):
        operations.decode_attention(q, cache, rows, out=out, scratch=scratch.expand(33, 2, 4, 10))
    with pytest.raises(KernelArgumentError, match="query_start must be None"):
        operations.decode_attention(q, cache, drawn.rows, out=out, scratch=scratch)
    with pytest.raises(KernelArgumentError, match="which tokens belong to which row"):
        operations.prefill_attention(q, cache, rows, out=out)
    with pytest.raises(KernelArgumentError, match=r"keys is torch\.float32 .* torch\.bfloat16"):
        operations.prefill_attention(q.bfloat16(), cache, drawn.rows, out=out.bfloat16())
    with pytest.raises(KernelArgumentError, match=r"context_len is torch\.int64"):
        operations.prefill_attention(
            q,
            cache,
            Rows(drawn.rows.context_len.long(), drawn.rows.block_table, drawn.rows.query_start),
            out=out,
        )
    with pytest.raises(KernelArgumentError, match="3 heads of 8 over 2"):
        operations.prefill_attention(q, replace(cache, heads=Heads(3, 2, 8, 0.3)), drawn.rows, out=out)
    assert bool(out.isnan().all())
