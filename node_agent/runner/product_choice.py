"""Chooses the code of a CPU node's bf16 products by a measurement, which is stored at the first start on this host.

The fastest code differs between processors: without AVX512 torch multiplies bf16 by a reference path, with AVX512 alone
oneDNN emulates it, and only with bf16 units bf16 is faster than fp32.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import geometric_mean

import msgspec
import torch
from torch.nn.functional import scaled_dot_product_attention

from cluster.json_file import write_json
from kernels.build import cache_folder, processor_key, unless_uncompiled
from kernels.product import ProductOperator
from node_agent.runner.products import Products, can_pack, few_rows, pack, packed_product, widened

log = logging.getLogger(__name__)

SAMPLE_BYTES = 24 << 20
"""Bytes of the sample of weights whose products are timed; more than a core's caches hold."""
LIMIT_S = 1.5
"""Maximum seconds of all rounds of timing after the first."""
ROUNDS = 5
FEW_ROWS = (2, 4, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of rows of x at which the compiled product is compared with the product of widened weights."""
COMPARED_ROWS = (1, 8, 128)
"""Numbers of rows of x at which packed weights are compared with plain ones: one decode row, a batch of them, a
prompt."""
MARGIN = 1.1
"""Ratio of the times of plain and packed weights above which packed ones are chosen even if they are faster at only
some of COMPARED_ROWS."""
ATTENTION_TOKENS = 128
MAX_STORED_BYTES = 1 << 16

Product = Callable[[torch.Tensor, torch.Tensor, None], torch.Tensor]
"""Function of (x, weight, None for no bias) that returns y = x W^T."""


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Stored choice of products."""

    packed: bool
    few: int
    wide_attention: bool
    milliseconds: dict[str, float]
    """shortest times of the sample's products, by kind and rows"""


def choose_products(weights: Iterable[torch.Tensor], folder: Path | None = None) -> Products | None:
    """Returns the choice of products for a model with these weights [d_out, d_in]. Returns None if torch's products are
    used: the weights are not bf16 on a CPU.

    A measurement takes about 3 s at most. It is stored in `folder` (None: that of the compiled operators).
    """
    sample = _sample(weights)
    if not sample or sample[0].dtype is not torch.bfloat16 or sample[0].device.type != "cpu":
        return None
    warning = "bf16 products run without the compiled operator, more slowly"
    operator = unless_uncompiled(ProductOperator, log, warning)
    file = _file(sample, operator, folder)
    choice = None if file is None else _stored(file)
    if choice is None:
        begin = time.perf_counter()
        choice = measure(sample, operator)
        log.info("matrix products measured", extra={"seconds": round(time.perf_counter() - begin, 2), **_extra(choice)})
        if file is not None:
            _store(choice, file)
    if not choice.packed:
        return Products(False, choice.few, choice.wide_attention, operator)
    return Products(True, 0, choice.wide_attention, None)


def measure(sample: list[torch.Tensor], operator: ProductOperator | None) -> Measured:
    """Times all kinds of products of this host in turn, and chooses.

    One thread computes, and its processor time counts, so that the result does not depend on the host's load.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            times = _time_all(_candidates(sample, operator))
    finally:
        torch.set_num_threads(threads)
    return decide(times)


def decide(times: dict[str, float]) -> Measured:
    """Returns the choice of products by these times in seconds. Keys of `times` are a kind and a number of rows; kinds
    are `few`, `widened` and, if possible, `packed`."""
    few = 1
    for rows in FEW_ROWS:
        if times[f"few {rows}"] > times[f"widened {rows}"]:
            break
        few = rows
    packed = False
    if f"packed {COMPARED_ROWS[0]}" in times:
        plain = [times[f"{'few' if rows <= few else 'widened'} {rows}"] for rows in COMPARED_ROWS]
        ratios = [time / times[f"packed {rows}"] for time, rows in zip(plain, COMPARED_ROWS, strict=True)]
        packed = max(ratios) > MARGIN or geometric_mean(ratios) > 1
    wide_attention = times["attention fp32"] * MARGIN < times["attention bf16"]
    return Measured(packed, few, wide_attention, {name: round(t * 1e3, 3) for name, t in times.items()})


def _candidates(sample: list[torch.Tensor], operator: ProductOperator | None) -> dict[str, Callable[[], object]]:
    """Returns the functions to time, by name. "KIND ROWS" multiplies the whole sample; "attention TYPE" computes one
    prompt's attention, in bf16 or fp32."""
    generator = torch.Generator().manual_seed(0)
    widths = sorted({weight.shape[1] for weight in sample})
    candidates: dict[str, Callable[[], object]] = {}
    packed = [pack(weight) for weight in sample] if can_pack() else []
    for rows in sorted({*FEW_ROWS, *COMPARED_ROWS}):
        by_width = {width: torch.randn(rows, width, generator=generator).bfloat16() for width in widths}
        xs = [by_width[weight.shape[1]] for weight in sample]
        if rows <= FEW_ROWS[-1]:
            candidates[f"few {rows}"] = partial(_multiply, partial(few_rows, operator=operator), xs, sample)
        if rows >= FEW_ROWS[0]:
            candidates[f"widened {rows}"] = partial(_multiply, widened, xs, sample)
        if rows in COMPARED_ROWS and packed:
            candidates[f"packed {rows}"] = partial(_multiply, packed_product, xs, packed)
    q = torch.randn(1, 8, ATTENTION_TOKENS, 64, generator=generator).bfloat16()
    return candidates | {
        "attention bf16": partial(_attend, q, q.dtype),
        "attention fp32": partial(_attend, q, torch.float32),
    }


def _multiply(product: Product, xs: list[torch.Tensor], weights: list[torch.Tensor]) -> None:
    for x, weight in zip(xs, weights, strict=True):
        product(x, weight, None)


def _attend(q: torch.Tensor, dtype: torch.dtype) -> None:
    scaled_dot_product_attention(q.to(dtype), q.to(dtype), q.to(dtype), is_causal=True).to(q.dtype)


def _time_all(candidates: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Returns the shortest of up to ROUNDS times of each function, in seconds.

    The first round is a warm-up; its times count only if there is no time for another.
    """
    times = dict.fromkeys(candidates, math.inf)
    deadline = math.inf
    for index in range(ROUNDS + 1):
        for name, compute in candidates.items():
            begin = time.thread_time()
            compute()
            elapsed_s = time.thread_time() - begin
            times[name] = elapsed_s if index <= 1 else min(times[name], elapsed_s)
            if time.perf_counter() > deadline:
                return times
        deadline = min(deadline, time.perf_counter() + LIMIT_S)
    return times


def _sample(weights: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    sample, size = [], 0
    for weight in weights:
        sample.append(weight)
        size += weight.numel() * weight.itemsize
        if size >= SAMPLE_BYTES:
            break
    return sample


def _file(sample: list[torch.Tensor], operator: ProductOperator | None, folder: Path | None) -> Path | None:
    """Returns the file of a measurement, whose name depends on processor, level, kinds, versions, threads and shapes.

    Returns None for a user without a home directory.
    """
    shapes = sorted({tuple(weight.shape) for weight in sample})
    kinds = (operator is not None, can_pack(), ROUNDS)
    parts = (processor_key(), version("garnish"), torch.__version__, torch.get_num_threads(), shapes, kinds)
    key = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    try:
        return (folder or cache_folder()) / f"products-{key}.json"
    except RuntimeError as error:
        log.warning(
            "matrix products are measured at every start: the result can't be stored", extra={"reason": str(error)}
        )
        return None


def _stored(file: Path) -> Measured | None:
    """Returns a stored measurement; None if the file is missing or can't be read."""
    try:
        with file.open("rb") as stream:
            return msgspec.json.decode(stream.read(MAX_STORED_BYTES), type=Measured)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        log.warning(
            "stored measurements of matrix products can't be read", extra={"file": str(file), "reason": str(error)}
        )
        return None


def _store(measured: Measured, file: Path) -> None:
    try:
        write_json(measured, file)
    except OSError as error:
        log.warning(
            "matrix products are measured at every start: the result can't be stored",
            extra={"file": str(file), "reason": str(error)},
        )


def _extra(choice: Measured) -> dict[str, object]:
    return {"packed": choice.packed, "few": choice.few, "wide_attention": choice.wide_attention}
