"""The compiled decoder operators against plain torch, and the same bits for any threads and neighbours."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from kernels.decoder import AttentionPass, DecoderOperators, Heads, PagedAttention, PagedCache
from kernels.view import KernelArgumentError

OPERATORS = {dtype: DecoderOperators(dtype) for dtype in (torch.float32, torch.bfloat16)}
dtypes = st.sampled_from(list(OPERATORS))
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8}
"""Of a value, for one rounding that falls the other way"""


@pytest.fixture(autouse=True)
def _threads() -> object:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def close(got: torch.Tensor, want: torch.Tensor, roundings: int = 1) -> None:
    """A hundredth more than so many roundings: they multiply, and sums are in fp32."""
    tolerance = 1.01 * roundings * TOLERANCE[got.dtype]
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=1e-30)


def by_threads(make: object) -> list[torch.Tensor]:
    found = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        found.append(make())  # type: ignore[operator]
    return found


@given(
    dtype=dtypes, rows=st.integers(0, 70), width=st.integers(1, 700), seed=st.integers(0, 99), scale=st.floats(-6, 6)
)
def test_rms_norm_is_hugging_faces(dtype: torch.dtype, rows: int, width: int, seed: int, scale: float) -> None:
    torch.manual_seed(seed)
    x = (torch.randn(rows, width) * 10**scale).to(dtype)
    norm = LlamaRMSNorm(width, eps=1e-5).to(dtype)
    norm.weight.data.normal_()
    got = OPERATORS[dtype].rms_norm(x, norm.weight.data, 1e-5)
    exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5) * norm.weight.data.double()
    close(got, exact, 2)
    close(got, norm(x).detach(), 4)  # each has rounded twice, and a quotient half-way may have gone either way
    for row in range(0, rows, 9):
        assert torch.equal(OPERATORS[dtype].rms_norm(x[row : row + 1], norm.weight.data, 1e-5), got[row : row + 1])
    assert all(
        torch.equal(got, other) for other in by_threads(lambda: OPERATORS[dtype].rms_norm(x, norm.weight.data, 1e-5))
    )


@given(
    dtype=dtypes, rows=st.integers(0, 40), width=st.integers(1, 900), seed=st.integers(0, 99), scale=st.floats(-4, 1.5)
)
def test_silu_mul(dtype: torch.dtype, rows: int, width: int, seed: int, scale: float) -> None:
    torch.manual_seed(seed)
    x = (torch.randn(rows, 2 * width) * 10**scale).to(dtype)
    got = OPERATORS[dtype].silu_mul(x)
    gate, up = x[:, :width].double(), x[:, width:].double()
    want = (gate * gate.sigmoid()).to(dtype).double() * up
    torch.testing.assert_close(got.double(), want, rtol=2 * TOLERANCE[dtype], atol=1e-30)
    assert all(torch.equal(got, other) for other in by_threads(lambda: OPERATORS[dtype].silu_mul(x)))


@pytest.mark.parametrize("dtype", OPERATORS)
def test_bad_numbers_stay_bad_in_their_row(dtype: torch.dtype) -> None:
    x = torch.randn(3, 80).to(dtype)
    for operator in (
        OPERATORS[dtype].silu_mul,
        lambda x: OPERATORS[dtype].rms_norm(x, torch.ones(80, dtype=dtype), 1e-5),
    ):
        clean = operator(x)
        for bad in (torch.nan, torch.inf):
            poisoned = x.clone()
            poisoned[1, 5] = bad
            found = operator(poisoned)
            assert not bool(found[1].isfinite().all())
            assert torch.equal(found[[0, 2]], clean[[0, 2]])


@dataclass
class World:
    """Sequences whose context lies in drawn blocks of a cache that is NaN everywhere else."""

    heads: Heads
    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor
    contexts: list[int]
    qkv: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    slots: torch.Tensor
    block_tokens: int
    rows: int

    def run(self, only: int | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Output of the decode rows, qkv, keys and values afterwards; of one row alone if it is named."""
        keys, values, qkv = self.keys.clone(), self.values.clone(), self.qkv.clone()
        tokens = slice(None) if only is None else slice(only, only + 1)
        rows = self.rows if only is None else 1
        contexts = self.contexts[tokens]
        made = AttentionPass(
            *(self.cos[tokens], self.sin[tokens], self.slots[tokens], self.table[tokens]),
            *(torch.tensor(contexts, dtype=torch.int32), contexts, rows, self.heads),
        )
        qkv = qkv[tokens]
        attention = PagedAttention(OPERATORS[qkv.dtype], PagedCache(self.heads, keys, values, self.block_tokens))
        return attention(qkv, made)[:rows], qkv, keys, values


@st.composite
def worlds(draw: st.DrawFn) -> World:
    dtype, kv_heads, dim = draw(dtypes), draw(st.integers(1, 4)), 2 * draw(st.integers(1, 70))
    block_tokens, rows, written = draw(st.integers(1, 20)), draw(st.integers(0, 5)), draw(st.integers(0, 3))
    contexts = [draw(st.integers(1, 200)) for _ in range(rows)] + [1] * written
    torch.manual_seed(draw(st.integers(0, 99)))
    normed = draw(st.booleans())
    scaling, window = draw(st.floats(0.05, 1.0)), draw(st.sampled_from([None, 1, 50, 64]))
    heads = Heads(
        kv_heads * draw(st.integers(1, 5)), kv_heads, dim, scaling, window,
        (torch.randn(dim).to(dtype), torch.randn(dim).to(dtype)) if normed else None, 1e-5,
    )  # fmt: skip
    needs = [-(-context // block_tokens) for context in contexts]
    order = torch.randperm(sum(needs) + 3).tolist()
    cache = torch.full((2, len(order) * block_tokens, kv_heads, dim), torch.nan, dtype=dtype)
    table = torch.full((len(contexts), max(needs, default=1) + 1), 2**20, dtype=torch.int32)
    slots = []
    for row, (context, need) in enumerate(zip(contexts, needs, strict=True)):
        table[row, :need] = torch.tensor([order.pop() for _ in range(need)], dtype=torch.int32)
        places = [int(table[row, p // block_tokens]) * block_tokens + p % block_tokens for p in range(context)]
        cache[:, places[:-1]] = torch.randn(2, context - 1, kv_heads, dim).to(dtype)
        slots.append(places[-1])
    if written and draw(st.booleans()):
        slots[-1] = -1
    angles = torch.rand(len(contexts), dim) * 6
    width = (heads.heads + 2 * kv_heads) * dim
    qkv = torch.randn(len(contexts), width).to(dtype)
    return World(
        heads, cache[0].contiguous(), cache[1].contiguous(), table, contexts, qkv,
        angles.cos().to(dtype), angles.sin().to(dtype), torch.tensor(slots, dtype=torch.int64), block_tokens, rows,
    )  # fmt: skip


def rotated(world: World) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v [T, heads, dim] by Hugging Face's functions."""
    h, tokens = world.heads, world.qkv.shape[0]
    q, k, v = world.qkv.view(tokens, h.heads + 2 * h.kv_heads, h.head_dim).split(
        [h.heads, h.kv_heads, h.kv_heads], dim=1
    )
    if h.norms:
        for_q, for_k = (LlamaRMSNorm(h.head_dim, h.norm_eps) for _ in range(2))
        for_q.weight.data, for_k.weight.data = h.norms
        q, k = for_q(q).detach(), for_k(k).detach()
    q, k = apply_rotary_pos_emb(q, k, world.cos, world.sin)
    return q, k, v


@given(world=worlds())
def test_attention(world: World) -> None:
    """Over drawn heads, widths, contexts, blocks and windows; float64 over the keys as they were written."""
    out, qkv, keys, values = world.run()
    q, k, v = rotated(world)
    h, tokens = world.heads, len(world.contexts)
    dtype = qkv.dtype
    parts = qkv.view(tokens, h.heads + 2 * h.kv_heads, h.head_dim).split([h.heads, h.kv_heads, h.kv_heads], dim=1)
    got_q, got_k = parts[:2]
    size = float(q.abs().max()) if q.numel() else 0.0
    for got, want in ((got_q, q), (got_k, k)):
        torch.testing.assert_close(got.float(), want.float(), rtol=0, atol=4 * TOLERANCE[dtype] * (1 + size))
    written = [slot for slot in world.slots.tolist() if slot >= 0]
    assert torch.equal(keys[written], got_k[: len(written)])
    assert torch.equal(values[written], v[: len(written)])
    keys[written], values[written] = torch.nan, torch.nan
    before = world.keys.clone(), world.values.clone()
    assert torch.equal(keys.isnan(), before[0].isnan())
    assert torch.equal(values.nan_to_num(7.0), before[1].nan_to_num(7.0))
    *_, keys, values = world.run()
    for row in range(world.rows):
        context = world.contexts[row]
        begin = max(0, context - h.window) if h.window else 0
        at = torch.arange(begin, context)
        places = world.table[row].long()[at // world.block_tokens] * world.block_tokens + at % world.block_tokens
        group = h.heads // h.kv_heads
        k64 = keys[places].double().repeat_interleave(group, dim=1)
        v64 = values[places].double().repeat_interleave(group, dim=1)
        scores = torch.einsum("hd,phd->hp", got_q[row].double(), k64) * h.scaling
        want = torch.einsum("hp,phd->hd", scores.softmax(dim=-1), v64)
        scale = 1 + float(scores.abs().max())  # an error of a score is one of its weight
        error = (out[row].view(h.heads, -1).double() - want).abs().max()
        assert float(error) <= float(v64.abs().max()) * (TOLERANCE[dtype] + 1e-6 * scale)


@given(world=worlds())
def test_a_row_has_the_same_bits_alone_and_with_any_threads(world: World) -> None:
    found = by_threads(lambda: world.run()[0])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    for row in range(world.rows):
        assert torch.equal(world.run(only=row)[0][0], found[0][row])


def test_refuses_what_it_cannot_take() -> None:
    operators = OPERATORS[torch.float32]
    with pytest.raises(KernelArgumentError, match="fp32 and bf16"):
        DecoderOperators(torch.float16)
    with pytest.raises(KernelArgumentError, match=r"x is torch\.bfloat16"):
        operators.silu_mul(torch.zeros(2, 4, dtype=torch.bfloat16))
    with pytest.raises(KernelArgumentError, match=r"\[..., 3\] is needed"):
        operators.rms_norm(torch.zeros(2, 4), torch.zeros(3), 1e-5)
    with pytest.raises(KernelArgumentError, match="contiguous"):
        operators.silu_mul(torch.zeros(4, 2).t())
    with pytest.raises(KernelArgumentError, match="3 heads of 4 over 2"):
        PagedAttention(operators, PagedCache(Heads(3, 2, 4, 1.0), torch.zeros(8, 2, 4), torch.zeros(8, 2, 4), 4))
    with pytest.raises(KernelArgumentError, match="is needed"):
        PagedAttention(operators, PagedCache(Heads(2, 2, 4, 1.0), torch.zeros(8, 2, 4), torch.zeros(8, 2, 5), 4))
    heads, at = Heads(2, 2, 4, 1.0), torch.zeros(1, 4)
    slots, table, contexts = (
        torch.zeros(1, dtype=torch.int64),
        torch.zeros(1, 2, dtype=torch.int32),
        torch.ones(1).int(),
    )
    with pytest.raises(KernelArgumentError, match="slots is"):
        AttentionPass(at, at, slots.int(), table, contexts, [1], 1, heads)
    with pytest.raises(KernelArgumentError, match="2 decode rows"):
        AttentionPass(at, at, slots, table, contexts, [1, 1], 2, heads)
    attention = PagedAttention(operators, PagedCache(heads, torch.zeros(8, 2, 4), torch.zeros(8, 2, 4), 4))
    with pytest.raises(KernelArgumentError, match="qkv is"):
        attention(torch.zeros(1, 20), AttentionPass(at, at, slots, table, contexts, [1], 1, heads))
