"""State of the GPU for a node's API process: the last sample, faults of the link, and a log of changes."""

from __future__ import annotations

import logging

from msgspec.structs import replace

from cluster.gpu import GpuFacts
from node_agent.gpu.reading import link_bandwidth
from node_agent.gpu.sampler import Sample, Sampler

MIN_SHARE = 0.5
"""Share of a link's nominal rate, 0 to 1, below which its measured rate counts as slow. Protocol overhead costs some of
the nominal rate."""

log = logging.getLogger(__name__)


class GpuWatch:
    """State of the node's GPU. Each fault, problem and slow link is logged once. `sampler` is None on a node that has
    claimed no GPU."""

    def __init__(self, sampler: Sampler | None) -> None:
        self._sampler = sampler
        self._before = GpuFacts(uuid="")

    @property
    def fault(self) -> str:
        """Reason why the GPU has become unusable; empty while it works."""
        sample = self._sampler.latest() if self._sampler is not None else None
        return sample.facts.fault if sample is not None else ""

    def poll(self, measured: float | None) -> Sample | None:
        """Returns the last sample, with a fault of the link added, and logs changes. Returns None without a sample.

        `measured`: bytes per second of the link to the GPU; None before its measurement.
        """
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
    """Returns the reason why a link counts as slow, or an empty text. `measured`: bytes per second, or None.

    The generation in use does not count: an idle GPU lowers it to save power.
    """
    if 0 < width_now < width:
        return f"the PCIe link to the GPU uses {width_now} of {width} lanes"
    full_rate = link_bandwidth(generation, width)
    if measured is not None and 0 < measured < MIN_SHARE * full_rate:
        return (
            f"the link to the GPU was measured at {measured / 1e9:.1f} GB/s; PCIe {generation}.0 x{width} "
            f"carries {full_rate / 1e9:.1f} GB/s"
        )
    return ""
