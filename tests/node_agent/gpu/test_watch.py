"""What a node makes of its GPU: it drains for a fault, and says each thing once."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest

from cluster.errors import ServiceError
from cluster.gpu import GpuFacts, GpuLoad
from node_agent.gpu.sampler import Sample
from node_agent.gpu.watch import GpuWatch
from tests.node_agent.scripted_engine import READY, stats
from tests.node_agent.served_node import request_of, run_scenario, served_node
from tests.node_agent.test_api_record import MODEL

FACTS = GpuFacts(uuid="GPU-1", index=0, pcie_generation=4, pcie_width=16, pcie_width_now=16)
LOAD = GpuLoad(1, 2, 3, 4, 5)


class ToldSampler:
    """Says what it is given."""

    def __init__(self, sample: Sample | None = None) -> None:
        self.sample = sample

    def latest(self) -> Sample | None:
        return self.sample


def test_a_fault_drains_the_node_for_good(tmp_path: Path, stories_dir: Path) -> None:
    """No operator can undrain it, and its requests go elsewhere."""
    sampler = ToldSampler()

    async def scenario() -> None:
        async with served_node(tmp_path, stories_dir) as node:
            node.registry._gpu = GpuWatch(sampler)  # type: ignore[arg-type]
            await node.engine()
            record = await node.record()
            assert (record.state, record.gpu, record.gpu_load) == ("ready", None, None)
            sampler.sample = Sample(FACTS, LOAD)
            record = await node.record()
            assert (record.state, record.gpu, record.gpu_load) == ("ready", FACTS, LOAD)
            fault = "Xid 79: the GPU has fallen off the bus"
            sampler.sample = Sample(msgspec.structs.replace(FACTS, fault=fault))
            record = await node.record()
            assert (record.state, record.error, record.gpu_load) == ("draining", fault, None)
            node.registry.draining = False
            assert (await node.record()).state == "draining"
            with pytest.raises(ServiceError, match="draining: Xid 79"):
                node.registry.submit(request_of("a"))

    run_scenario(scenario())


def test_the_measured_link_is_compared(tmp_path: Path, stories_dir: Path) -> None:
    async def scenario() -> None:
        async with served_node(tmp_path, stories_dir) as node:
            node.registry._gpu = GpuWatch(ToldSampler(Sample(FACTS, LOAD)))  # type: ignore[arg-type]
            for device, told in (("cpu", ""), ("cuda:0", "measured at 1.0 GB/s")):
                engine = await node.engine(msgspec.structs.replace(READY, device=device))
                await engine.say(stats(performance=MODEL))
                record = await node.record_where(
                    lambda record, device=device: record.device == device and record.performance is not None
                )
                assert record.gpu is not None and told in record.gpu.slow_link
                assert bool(told) == bool(record.gpu.slow_link)

    run_scenario(scenario())


def test_each_thing_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    sampler = ToldSampler()
    watch = GpuWatch(sampler)  # type: ignore[arg-type]
    watch.poll(None)
    for facts in (
        FACTS,
        msgspec.structs.replace(FACTS, xid=31, xids=1),
        msgspec.structs.replace(FACTS, xid=31, xids=1, problem="nvmlDeviceGetName does not return"),
        msgspec.structs.replace(FACTS, xid=31, xids=1, pcie_width_now=4),
        msgspec.structs.replace(FACTS, xid=31, xids=1, fault="it is lost"),
    ):
        sampler.sample = Sample(facts)
        watch.poll(25e9)
        watch.poll(25e9)
    levels = [(record.levelname, record.getMessage().split(" ")[0:2]) for record in caplog.records]
    assert [level for level, _ in levels] == ["WARNING", "WARNING", "WARNING", "ERROR"]
