"""What is known of a GPU, whatever NVML does: over a library that fails in each way."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator

import pynvml
import pytest

from cluster.gpu import GpuFacts, GpuLoad
from node_agent.gpu import sampler as sampler_module
from node_agent.gpu.reading import FATAL_XIDS
from node_agent.gpu.sampler import MAX_CALL_S, Sample, Sampler
from tests.node_agent.gpu.conftest import MakeNvml
from tests.node_agent.gpu.fake_nvml import FUNCTIONS, FakeNvml

GIB = 1 << 30
PATIENCE_S = 60.0
VALUES = {
    "nvmlDeviceGetMemoryInfo": 5 * GIB,
    "nvmlDeviceGetUtilizationRates": 87,
    "nvmlDeviceGetPowerUsage": 61_499,
    "nvmlDeviceGetTemperature": 43,
    "nvmlDeviceGetCurrentClocksEventReasons": 0x44,
    "nvmlDeviceGetMaxPcieLinkGeneration": 4,
    "nvmlDeviceGetMaxPcieLinkWidth": 16,
    "nvmlDeviceGetCurrPcieLinkWidth": 8,
    "nvmlDeviceGetTotalEccErrors": 3,
    "nvmlDeviceGetIndex": 2,
}
FACTS = GpuFacts(
    uuid="GPU-2", index=2, name="Fake L4", driver="570.1", memory=24 * GIB, pcie_generation=4, pcie_width=16,
    pcie_width_now=8, link=31_507_692_308.0, ecc_corrected=3,
)  # fmt: skip
LOAD = GpuLoad(memory_used=5 * GIB, utilisation=87, power=61, temperature=43, throttled=0x44)
OF_LOAD = {
    "nvmlDeviceGetMemoryInfo": "memory_used",
    "nvmlDeviceGetUtilizationRates": "utilisation",
    "nvmlDeviceGetPowerUsage": "power",
    "nvmlDeviceGetTemperature": "temperature",
}
WATCHED = sorted(
    {*VALUES, "nvmlDeviceGetName", "nvmlSystemGetDriverVersion", "nvmlDeviceGetRemappedRows"}
    - {"nvmlDeviceGetCurrentClocksEventReasons"}
)
"""Calls that a sampler can do without."""

Start = Callable[..., Sampler]


def values(fake: FakeNvml) -> FakeNvml:
    for name, value in VALUES.items():
        fake.set(name, value=value)
    return fake


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts samplers, which hardly pause and end with the test."""
    monkeypatch.setattr(sampler_module, "MIN_PAUSE_S", 0.002)
    started: list[Sampler] = []

    def begin(clock: Callable[[], float] = time.monotonic) -> Sampler:
        sampler = Sampler("GPU-2", interval=0.01, clock=clock)
        started.append(sampler)
        sampler.start()
        return sampler

    yield begin
    for sampler in started:
        sampler.close()


def sample_where(sampler: Sampler, wanted: Callable[[Sample], bool]) -> Sample:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        sample = sampler.latest()
        if sample is not None and wanted(sample):
            return sample
        time.sleep(0.005)
    raise AssertionError(f"it says {sampler.latest()}")


def whole(sample: Sample) -> bool:
    return sample.load is not None


def test_a_sample_has_all_that_nvml_tells(make_nvml: MakeNvml, start: Start) -> None:
    fake = values(make_nvml())
    sampler = start()
    assert sample_where(sampler, whole) == Sample(FACTS, LOAD)
    fake.set("nvmlDeviceGetTemperature", value=91)
    assert sample_where(sampler, lambda s: whole(s) and s.load.temperature == 91).facts == FACTS


def test_without_nvml_nothing_is_known_and_nothing_is_wrong(
    monkeypatch: pytest.MonkeyPatch, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pynvml, "CDLL", lambda name: ctypes.CDLL("libthere-is-none.so.1"))
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    sampler = start()
    sampler._thread.join(PATIENCE_S)
    assert sampler.latest() is None and not caplog.records


@pytest.mark.parametrize("code", [3, 4, 13], ids=["not supported", "no permission", "function not found"])
def test_what_is_absent_is_left_out(make_nvml: MakeNvml, start: Start, code: int) -> None:
    fake = values(make_nvml())
    for name in (*WATCHED, "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
        fake.set(name, code=code, value=7)
    fake.set("nvmlEventSetCreate", code=code)
    assert sample_where(start(), whole) == Sample(GpuFacts(uuid="GPU-2"), GpuLoad())


def test_an_old_library_lacks_functions(make_nvml: MakeNvml, start: Start) -> None:
    needed = {"nvmlInitWithFlags", "nvmlErrorString", "nvmlDeviceGetHandleByUUID"}
    values(make_nvml(missing=set(FUNCTIONS) - needed))
    assert sample_where(start(), whole) == Sample(GpuFacts(uuid="GPU-2"), GpuLoad())


def test_a_driver_before_535_calls_it_throttle_reasons(make_nvml: MakeNvml, start: Start) -> None:
    fake = values(make_nvml(missing={"nvmlDeviceGetCurrentClocksEventReasons"}))
    fake.set("nvmlDeviceGetCurrentClocksThrottleReasons", value=0x80)
    load = sample_where(start(), whole).load
    assert load is not None and load.throttled == 0x80


@pytest.mark.parametrize("name", WATCHED)
def test_a_call_that_fails_is_said_and_costs_its_value_alone(make_nvml: MakeNvml, start: Start, name: str) -> None:
    fake = values(make_nvml())
    sampler = start()
    sample_where(sampler, whole)
    fake.set(name, code=999, value=VALUES.get(name, 0))
    static = {"nvmlDeviceGetName", "nvmlSystemGetDriverVersion", "nvmlDeviceGetIndex"}
    if name in static or "Max" in name:  # asked for once
        sampler.close()
        sampler = start()
    sample = sample_where(sampler, lambda s: name in s.facts.problem and whole(s))
    assert not sample.facts.fault
    for other, field in OF_LOAD.items():
        assert (getattr(sample.load, field) is None) == (other == name)
    fake.set(name, value=VALUES.get(name, 0))
    if name not in static and "Max" not in name:
        sample_where(sampler, lambda s: not s.facts.problem and s.load == LOAD)


@pytest.mark.parametrize("name", ["nvmlInitWithFlags", "nvmlDeviceGetHandleByUUID"])
def test_nvml_that_can_t_be_used_is_said_and_tried_again(
    make_nvml: MakeNvml, start: Start, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a library of another version than the driver's."""
    monkeypatch.setattr(sampler_module, "RETRY_S", 0.02)
    fake = values(make_nvml())
    fake.set(name, code=18)
    started = start()
    facts = sample_where(started, lambda s: bool(s.facts.problem)).facts
    assert "mismatch" in facts.problem and not facts.fault
    fake.set(name)
    assert sample_where(started, whole) == Sample(FACTS, LOAD)


@pytest.mark.parametrize("code", [15, 16], ids=["lost", "reset required"])
@pytest.mark.parametrize("name", ["nvmlDeviceGetHandleByUUID", "nvmlDeviceGetPowerUsage", "nvmlEventSetWait_v2"])
def test_a_lost_gpu_is_a_fault_for_ever(make_nvml: MakeNvml, start: Start, name: str, code: int) -> None:
    fake = values(make_nvml())
    fake.set(name, code=code)
    sampler = start()
    sample = sample_where(sampler, lambda s: bool(s.facts.fault))
    assert "the GPU is lost" in sample.facts.fault and sample.load is None
    fake.set(name)
    sampler._thread.join(PATIENCE_S)
    assert sampler.latest() == sample


def test_a_gpu_that_is_not_there_any_more_is_lost(make_nvml: MakeNvml, start: Start) -> None:
    values(make_nvml()).set("nvmlDeviceGetHandleByUUID", code=6)
    assert "the GPU is lost" in sample_where(start(), lambda s: bool(s.facts.fault)).facts.fault


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("nvmlDeviceGetTotalEccErrors", 1 << 32, "uncorrectable ECC"),
        ("nvmlDeviceGetRemappedRows", 1, "can't be remapped"),
    ],
)
def test_memory_that_fails_is_a_fault(make_nvml: MakeNvml, start: Start, name: str, value: int, fault: str) -> None:
    fake = values(make_nvml())
    sampler = start()
    assert not sample_where(sampler, whole).facts.fault
    fake.set(name, value=value)
    assert fault in sample_where(sampler, lambda s: bool(s.facts.fault)).facts.fault


@pytest.mark.parametrize("xid", [*FATAL_XIDS, 13, 31, 94])
def test_xid_errors_are_counted_and_some_are_faults(make_nvml: MakeNvml, start: Start, xid: int) -> None:
    fake = values(make_nvml())
    sampler = start()
    fake.set("nvmlEventSetWait_v2", value=xid)
    facts = sample_where(sampler, lambda s: s.facts.xids > 0).facts
    assert (facts.xid, facts.xids, bool(facts.fault)) == (xid, 1, xid in FATAL_XIDS)


@pytest.mark.parametrize("name", ["nvmlInitWithFlags", "nvmlDeviceGetPowerUsage", "nvmlEventSetWait_v2"])
def test_a_call_that_hangs_is_said_and_stops_nobody(make_nvml: MakeNvml, start: Start, name: str) -> None:
    """By a clock that goes on when it is looked at, while the test has it so."""
    fake, now, first = values(make_nvml()), [0.0], name == "nvmlInitWithFlags"

    def clock() -> float:
        now[0] += MAX_CALL_S / 4 if moves.is_set() else 0.0
        return now[0]

    moves = threading.Event()
    if first:
        fake.set(name, hangs=True)
    sampler = start(clock=clock)
    if not first:
        sample_where(sampler, whole)
        fake.set(name, hangs=True)
    before = threading.active_count()
    moves.set()
    problem = sample_where(sampler, lambda s: "does not return" in s.facts.problem)
    moves.clear()
    assert problem.load is None and not problem.facts.fault
    assert threading.active_count() <= before
    fake.set(name)
    if not first:
        sample_where(sampler, lambda s: whole(s) and "does not return" not in s.facts.problem)
