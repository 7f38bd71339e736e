"""Small profiles and requests for tests of the simulator."""

from __future__ import annotations

import msgspec

from cluster.performance_model import DecodeModel, ModelKey, PerformanceModel, PrefillModel, RankTerm, Transfer
from garnish.simulation.job import Job
from garnish.simulation.profile import NodeProfile
from garnish.simulation.simulator import Simulator
from gateway.scheduling.baselines import MostIdle


def model(rank_term: RankTerm = "max_rank", exposed_share: float = 0.3, padded_rank: int = 0) -> PerformanceModel:
    """Odd numbers, so that no two events fall together by chance."""
    return PerformanceModel(
        key=ModelKey("test", "base", "float32", "cpu", "test"),
        decode=DecodeModel(0.0101, 0.00037, 1.3e-6, 2.1e-5, rank_term, flat_rows=2, padded_rank=padded_rank),
        prefill=PrefillModel(0.0053, 0.00019, 1.7e-8, 1.1e-6, padded_rank),
        to_device=Transfer(0.0007, 3.1e6),
        from_store=Transfer(0.0011, 9.7e5),
        exposed_share=exposed_share,
    )


PROFILE = NodeProfile(
    title="test",
    source="assumed",
    performance=model(),
    max_rows=4,
    chunk_tokens=64,
    queue_limit=16,
    kv_tokens=2048,
    adapter_memory=100_000,
    host_memory=300_000,
    bytes_per_rank=1000,
)
CACHED = msgspec.structs.replace(PROFILE, adapter_memory=None, host_memory=None)
"""Every adapter is on the device."""


def job(number: int, at: float, prompt: int = 20, output: int = 5, rank: int = 8, digest: str | None = "a") -> Job:
    size = 0 if digest is None else rank * PROFILE.bytes_per_rank
    return Job(number, at, digest, 0 if digest is None else rank, size, prompt, output, max_tokens=output)


def run(jobs: list[Job], profile: NodeProfile = PROFILE, nodes: int = 1) -> Simulator:
    simulator = Simulator(profile, nodes, lambda _: MostIdle(), jobs)
    simulator.run()
    return simulator
