"""Prints which kernels would be compiled while a node serves: every operation is called once, as a runner warms up, and
then with all that changes from step to step changed at random. And how many launches the layer of a decode step has. In
a process whose Triton does not interpret."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch

from kernels.decode import bgmv, mbgmv
from kernels.decoder import Heads, PagedCache
from kernels.gpu_ops import Rotary, Rows, decode_scratch
from kernels.gpu_triton import TritonOperations
from kernels.sgmv import sgmv
from tests.support.decode_step import ADAPTED, SHAPES, step_row
from tests.support.kernel_cases import draw_case
from tests.support.kernel_recorder import recorded

HEADS = Heads(4, 2, 32, 0.2)
WIDTH, INNER, MAX_TOKENS, STEPS = 128, 192, 300, 25
CASE = draw_case([8, 3, 40], [(0, MAX_TOKENS)], WIDTH, (128, 64, 64), torch.bfloat16)


def upload(rng: random.Random, values: torch.Tensor) -> torch.Tensor:
    """The values somewhere in a larger buffer."""
    before = rng.randint(0, 7)
    return torch.cat((values.new_zeros(before), values.flatten(), values.new_zeros(9)))[
        before : before + values.numel()
    ].view(values.shape)


def lora_calls(rng: random.Random, tokens: int, segments: int) -> Iterator[Callable[[], None]]:
    cuts = sorted(rng.choices(range(tokens + 1), k=segments - 1))
    start = upload(rng, torch.tensor([0, *cuts, tokens], dtype=torch.int32))
    slot = upload(rng, torch.tensor([rng.randint(-1, 2) for _ in range(segments)], dtype=torch.int32))
    largest = rng.randint(0, CASE.max_rank)
    for operation in (bgmv, mbgmv, sgmv):
        ys = [y[:tokens] for y in CASE.fresh()]
        call = CASE.call(ys, x=CASE.x[:tokens], seg_start=start, seg_slot=slot, max_rank=largest)
        yield partial(operation, call)


def layer_calls(rng: random.Random, tokens: int, rows: int) -> Iterator[Callable[[], None]]:
    operations, dtype = TritonOperations(), torch.bfloat16
    x, qkv = torch.zeros(tokens, WIDTH, dtype=dtype), torch.zeros(tokens + rows, 256, dtype=dtype)
    gate_up = torch.zeros(tokens, 2 * INNER, dtype=dtype)
    cache = PagedCache(HEADS, *torch.zeros(2, 64, 2, 32, dtype=dtype).unbind(), 16)
    at = upload(rng, torch.zeros(tokens + rows, dtype=torch.int64))
    table = upload(rng, torch.zeros(rows, rng.randint(1, 40), dtype=torch.int32))
    context = upload(rng, torch.ones(rows, dtype=torch.int32))
    starts = upload(rng, torch.arange(rows + 1, dtype=torch.int32))
    scratch, out = (
        decode_scratch(rows, HEADS, rng.randint(1, 9000), torch.device("cpu")),
        qkv.new_zeros(tokens + rows, 128),
    )
    rotary = Rotary(torch.zeros(9, 16, dtype=dtype), torch.zeros(9, 16, dtype=dtype))
    yield lambda: operations.add_rms_norm(x, x.new_ones(WIDTH), 1e-5, out=torch.empty_like(x), residual=None)
    yield lambda: operations.add_rms_norm(x, x.new_ones(WIDTH), 1e-5, out=torch.empty_like(x), residual=x.clone())
    yield lambda: operations.silu_mul(gate_up, out=x.new_empty(tokens, INNER))
    yield lambda: operations.rotate_and_store(qkv, rotary, cache, positions=at, slots=at)
    yield lambda: operations.decode_attention(qkv[:rows], cache, Rows(context, table), out=out[:rows], scratch=scratch)
    yield lambda: operations.prefill_attention(qkv[rows:], cache, Rows(context, table, starts), out=out[rows:])


def keys_of(calls: Iterator[Callable[[], None]]) -> set[tuple[str, str]]:
    with recorded(90) as launches:
        for call in calls:
            call()
    return {(launch.kernel, launch.key) for launch in launches}


def main() -> None:
    rng = random.Random(int(sys.argv[1]))
    # one token; and two rows that split, so that what adds the splits up is launched
    known = keys_of(lora_calls(rng, 1, 1)) | keys_of(layer_calls(rng, 1, 1))
    new: set[tuple[str, str]] = set()
    for _ in range(STEPS):
        tokens, rows = rng.randint(1, MAX_TOKENS), rng.randint(1, 70)
        new |= keys_of(lora_calls(rng, tokens, rng.randint(1, 90))) | keys_of(layer_calls(rng, tokens, rows))
    odd = torch.zeros(2, WIDTH + 1, dtype=torch.bfloat16)[:, :WIDTH]
    other = keys_of(
        iter([lambda: TritonOperations().add_rms_norm(odd, odd[0], 1e-5, out=odd.contiguous(), residual=None)])
    )
    json.dump(
        {
            "known": sorted({kernel for kernel, _ in known}),
            "while serving": sorted(new - known),
            "a stride that was not there": sorted({kernel for kernel, _ in other - known}),
            "launches of a layer": {
                f"{rows} rows, {adapted}": step_row(SHAPES[0], rows, adapted)["layer_launches"]
                for rows in (1, 256)
                for adapted in ADAPTED
            },
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
