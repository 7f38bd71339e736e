"""Measures a node's profile: the costs of a layer, of a worker's slice and of the link.

A first start measures briefly. `garnish profile` uses more points and repetitions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np
import torch

from adapters.artifact import ArtifactHeader, LayerBlock, StoredPair
from adapters.base_model import BaseModel
from cluster.least_squares import nonnegative
from cluster.messages import Sampling
from node_agent.adapter_memory.layout import AdapterLayout, lay_out
from node_agent.adapter_memory.store import AdapterStore
from node_agent.coldstart.calibration import Interrupted, never
from node_agent.coldstart.costs import group_elements
from node_agent.coldstart.profile import CpuLora, LinkCost, Profile, ProfileError, ProfileKey
from node_agent.coldstart.slices import Segment
from node_agent.coldstart.stream import StreamPool
from node_agent.coldstart.workers import WorkerPool
from node_agent.device import device_seconds
from node_agent.engine.batch import build_step
from node_agent.engine.kv_blocks import BlockPool
from node_agent.engine.request import Request
from node_agent.engine.rows import Row
from node_agent.runner.lora import NoHandoffs
from node_agent.sending_runner import batch_device
from node_agent.types import GROUPS, ModelRunner, PassLora, StepBatch

GROUP = "qkv"
"""Projection group whose slices are measured."""
HANDED_ROWS = 64
"""Number of rows of the larger of the two measured handoffs; few enough for a slow simulated link."""
LENT = "measured"
"""Digest of the synthetic adapter whose slices are measured."""
LINK = "link"
"""Name of the owner of the device pages to which the measurement copies."""


@dataclass(frozen=True)
class Effort:
    """Extent of a measurement: its points and repetitions."""

    tokens: tuple[int, ...]
    """prompt lengths for layers, and slice lengths for workers, in tokens"""
    ranks: tuple[int, ...]
    rounds: int


SHORT = Effort((16, 64, 256), (8, 64), 3)
LONG = Effort((8, 16, 32, 64, 128, 256, 512), (8, 16, 32, 64, 128), 15)


def measure(
    key: ProfileKey,
    runner: ModelRunner,
    blocks: BlockPool,
    store: AdapterStore,
    workers: WorkerPool | None,
    effort: Effort,
    progress: Callable[[str], None] = lambda _: None,
) -> Profile:
    """Returns the measured profile of a node, which must serve nothing while it is measured. `progress` is called with
    the name of each step."""
    progress("a layer on the device")
    layer = measure_layers(runner, blocks, effort.tokens, effort.rounds, assisted=isinstance(workers, StreamPool))
    progress("the link from host memory")
    link = measure_link(store, effort.rounds)
    cpu = handoff = None
    if workers is not None:
        progress("a worker's slice")
        cpu = measure_cpu(store, workers, effort)
    if workers is not None and cpu is not None and crosses_link(workers):
        progress("a handoff")
        handoff = measure_handoff(workers, store.pool.data.device, effort.rounds)
    return Profile(key, layer, cpu, link, handoff)


def measure_layers(
    runner: ModelRunner,
    blocks: BlockPool,
    tokens: Sequence[int],
    rounds: int,
    assisted: bool,
    should_yield: Callable[[], bool] = never,
) -> tuple[tuple[int, float], ...]:
    """Measures a layer, by `rounds` passes, for each of these prompt lengths that fits. Returns (tokens, seconds)
    pairs.

    `assisted`: measure the kind of pass in which a GPU hands layers to CPU workers, but without handoffs. Raises
    Interrupted as soon as `should_yield` returns True.
    """
    room = blocks.free * runner.block_tokens
    if not room:
        raise Interrupted("no KV block is free for a measured pass")
    lora = NoHandoffs((GROUP,)) if assisted else None
    run = partial(_pass_seconds, runner, lora=lora, should_yield=should_yield)
    return tuple((n, _layer_seconds(runner, blocks, n, rounds, run)) for n in sorted({min(n, room) for n in tokens}))


def _layer_seconds(
    runner: ModelRunner, blocks: BlockPool, tokens: int, rounds: int, run: Callable[[StepBatch], float]
) -> float:
    """Returns the seconds of one layer for a prompt of `tokens` tokens: the median of `rounds` passes over all
    layers."""
    request = Request("profile", "", [1] * tokens, 1, Sampling(temperature=0.0), 0.0, None, ignore_eos=True)
    allocated = blocks.allocate(blocks.blocks_for(tokens))
    assert allocated is not None  # enough blocks are free
    request.blocks = allocated
    times = []
    try:
        for _ in range(rounds + 1):
            times.append(run(build_step([Row(request, tokens)], 0, runner.block_tokens, batch_device(runner))))
    finally:
        blocks.release(allocated)
    return median(times[1:]) / runner.num_layers


def _pass_seconds(
    runner: ModelRunner, batch: StepBatch, lora: PassLora | None, should_yield: Callable[[], bool]
) -> float:
    """Returns the seconds of a pass over all layers, by GPU events on a GPU. `lora` must add nothing. Raises
    Interrupted."""
    run = runner.start(batch, lora)
    layers = runner.num_layers
    stretch = layers if runner.device.type == "cuda" else run.stretch  # a GPU computes later than it is told

    def advance() -> None:
        while run.layer < layers:
            if should_yield():
                raise Interrupted("the engine has requests to serve")
            run.advance(min(run.layer + stretch, layers))

    try:
        return device_seconds(runner.device, advance)
    finally:
        run.abort().synchronize()


def measure_link(store: AdapterStore, rounds: int) -> LinkCost:
    """Returns the cost of the link, by copies of 1 and of up to 16 pages from host memory to the device. Uses free
    device pages, and includes the cost of a simulated link."""
    host, device = store.host_memory.pool, store.pool
    pages = device.pages.take(min(16, host.pages.count, device.pages.free), LINK) or []
    try:
        return _link_cost(store, pages, rounds)
    finally:
        device.pages.give(pages, LINK)


def _link_cost(store: AdapterStore, taken_pages: list[int], rounds: int) -> LinkCost:
    host, device, pages = store.host_memory.pool, store.pool, len(taken_pages)
    if not pages:
        return LinkCost(0.0, 1e9)  # no adapter fits, so nothing will be loaded
    elements = host.page_size // host.data.element_size()
    places = [(_page(to, elements), _page(of, elements)) for of, to in enumerate(taken_pages)]

    def copy(count: int) -> None:
        for to, of in places[:count]:
            device.data[to].copy_(host.data[of], non_blocking=True)

    one, all_pages_s = (_median_seconds(device.data.device, partial(copy, count), rounds) for count in (1, pages))
    size = host.page_size
    per_byte = max((all_pages_s - one) / (size * (pages - 1)) if pages > 1 else one / size, 1e-13)
    latency = max(0.0, one - size * per_byte)
    simulated = store.simulated_link
    if simulated is not None:
        per_byte, latency = per_byte + 1 / simulated.bandwidth, latency + simulated.latency
    return LinkCost(latency, 1 / per_byte)


def _median_seconds(device: torch.device, work: Callable[[], object], rounds: int) -> float:
    """Returns the median seconds of `rounds` runs, after one run that does not count."""
    return median([device_seconds(device, work) for _ in range(rounds + 1)][1:])


def _page(number: int, elements: int) -> slice:
    return slice(number * elements, (number + 1) * elements)


def crosses_link(workers: WorkerPool) -> bool:
    """Returns whether handoffs cross a real or simulated link, rather than memory shared by engine and workers."""
    return isinstance(workers, StreamPool) or workers.link is not None


def measure_handoff(workers: WorkerPool, device: torch.device, rounds: int) -> LinkCost:
    """Returns the cost of a handoff that workers answer without computing. It is measured with one row and with
    HANDED_ROWS rows. Raises ProfileError if no worker takes them."""
    width = max(d_in for d_in, _ in workers.layout.widths)
    sizes = sorted({1, min(HANDED_ROWS, workers.layout.max_tokens)})
    seconds = []
    workers.arm()
    try:
        for tokens in sizes:
            x = torch.zeros(tokens, width, dtype=workers.layout.torch_dtype, device=device)
            seconds.append(_median_seconds(device, partial(_hand_over, workers, x), rounds))
    finally:
        workers.disarm()
    row = width * workers.layout.torch_dtype.itemsize
    per_byte = max((seconds[-1] - seconds[0]) / (row * max(1, sizes[-1] - sizes[0])), 1e-13)
    return LinkCost(max(0.0, seconds[0] - row * per_byte), 1 / per_byte)


def _hand_over(workers: WorkerPool, x: torch.Tensor) -> None:
    one = workers.begin_pass()
    segment = Segment(0, x.shape[0], x.shape[0])
    handoff = one.open(x, [segment], 0, None) if one is not None else None
    if one is None or handoff is None:
        raise ProfileError("no CPU worker takes a handoff")
    handoff.wait()
    handoff.close()
    one.end()


def measure_cpu(store: AdapterStore, workers: WorkerPool, effort: Effort) -> CpuLora | None:
    """Returns the costs that fit measured slices of one worker best, without a simulated link. The adapter is
    synthetic. Returns None if no worker answers."""
    samples: list[tuple[int, int, float]] = []
    base = store.base
    link, workers.link = workers.link, None
    workers.arm()
    try:
        for rank in effort.ranks:
            layout = lay_out(_header(base, rank), base, store.pool.data.element_size(), store.pool.page_units)
            with lent_rows(store, layout) as slot:
                if slot is None:
                    return None
                elements = group_elements(layout, 0, base)[GROUP]
                for tokens in sorted({min(tokens, workers.layout.max_tokens) for tokens in effort.tokens}):
                    seconds = _slice_seconds(workers, base, slot, tokens, effort.rounds)
                    if seconds is None:
                        return None
                    samples.append((tokens, elements, seconds))
    finally:
        workers.disarm()
        workers.link = link
    return fit_cpu(samples)


def _slice_seconds(workers: WorkerPool, base: BaseModel, slot: int, tokens: int, rounds: int) -> float | None:
    x = torch.zeros(tokens, base.widths[GROUPS[GROUP][0]][0], dtype=workers.layout.torch_dtype)
    times = []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        handoff = workers.open(x, [Segment(slot, tokens, tokens)], 0, GROUP)
        if handoff is None:
            return None
        arrived = handoff.wait()
        times.append(time.perf_counter() - begin)
        handoff.close()
        if not arrived:
            return None
    return median(times[1:])


@contextmanager
def lent_rows(store: AdapterStore, layout: AdapterLayout) -> Iterator[int | None]:
    """Allocates an adapter of zeros in host memory, and yields its slot in the host table. Yields None when host memory
    has no room."""
    host = store.hosts.lend(LENT, layout)
    try:
        yield None if host is None else host.slot
    finally:
        if host is not None:
            store.hosts.let_go(host)
            store.hosts.forget(host)


def _header(base: BaseModel, rank: int) -> ArtifactHeader:
    """Returns the header of an adapter of rank `rank` that adapts the measured projection group of the first layer
    alone."""
    pairs = tuple(StoredPair(p, rank, 1.0, 0, 0) for p in GROUPS[GROUP])
    layers = (LayerBlock(0, 0, "", pairs), *(LayerBlock(0, 0, "", ()) for _ in range(base.num_layers - 1)))
    return ArtifactHeader(1, "measured", base.fingerprint, "float32", layers)


def fit_cpu(samples: list[tuple[int, int, float]]) -> CpuLora:
    """Returns the non-negative costs that best fit samples of (tokens, elements, seconds). The fit is by least squares
    of relative errors."""
    seconds = np.array([sample[2] for sample in samples])
    columns = np.array([[1.0, elements, tokens * elements] for tokens, elements, _ in samples])
    return CpuLora(*nonnegative(columns / seconds[:, None], np.ones(len(samples))).tolist())
