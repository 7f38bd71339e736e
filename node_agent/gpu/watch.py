"""What a node's API process says of its GPU: the last sample, the link as measured, and a log of what changed."""

from __future__ import annotations

import logging

from msgspec.structs import replace

from cluster.gpu import GpuFacts
from node_agent.gpu.reading import link_bandwidth
from node_agent.gpu.sampler import Sample, Sampler

MIN_SHARE = 0.5
"""Of what a link carries, below which a measured one counts as slow: headers and copies take their part of it."""

log = logging.getLogger(__name__)


class GpuWatch:
    """Logs each fault, problem and slow link once. `sampler` is None on a node without a GPU of its own."""

    def __init__(self, sampler: Sampler | None) -> None:
        self._sampler = sampler
        self._before = GpuFacts(uuid="")

    @property
    def fault(self) -> str:
        """The reason why the GPU can't be used any more; empty where it can."""
        sample = self._sampler.latest() if self._sampler is not None else None
        return sample.facts.fault if sample is not None else ""

    def look(self, measured: float | None) -> Sample | None:
        """Returns how the GPU is; None where nothing is known of one. `measured`: bytes per second of the link to it,
        None before that was measured."""
        sample = self._sampler.latest() if self._sampler is not None else None
        if sample is None:
            return None
        facts = sample.facts
        facts = replace(
            facts, slow_link=slow_link(facts.pcie_generation, facts.pcie_width, facts.pcie_width_now, measured)
        )
        self._log_changes(facts)
        return Sample(facts, sample.load)

    def _log_changes(self, facts: GpuFacts) -> None:
        before, self._before = self._before, facts
        gpu = {"gpu": facts.uuid, "index": facts.index}
        if facts.fault and facts.fault != before.fault:
            log.error("the GPU can't be used any more: the node drains", extra={**gpu, "reason": facts.fault})
        if facts.slow_link and not before.slow_link:
            log.warning("the link to the GPU is slow", extra={**gpu, "reason": facts.slow_link})
        if facts.problem and not before.problem:
            log.warning("the GPU can't be watched", extra={**gpu, "reason": facts.problem})
        if facts.xids > before.xids:
            log.warning("the GPU has reported an Xid error", extra={**gpu, "xid": facts.xid, "count": facts.xids})


def slow_link(generation: int, width: int, width_now: int, measured: float | None) -> str:
    """Returns how a link is slower than it should be, or an empty text. `measured`: bytes per second, None where
    nothing was measured.

    The generation in use is no sign: a GPU that is idle lowers it to save power.
    """
    if 0 < width_now < width:
        return f"the PCIe link to the GPU uses {width_now} of {width} lanes"
    whole = link_bandwidth(generation, width)
    if measured is not None and 0 < measured < MIN_SHARE * whole:
        return (
            f"the link to the GPU was measured at {measured / 1e9:.1f} GB/s; PCIe {generation}.0 x{width} "
            f"carries {whole / 1e9:.1f} GB/s"
        )
    return ""
