"""Cold starts while store, disk or host memory fail, on the real engine: an answer is exact, or there is none."""

from __future__ import annotations

import resource
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from adapters.artifact import read_header
from adapters.s3_calls import S3Limits
from adapters.s3_store import S3Store
from adapters.s3_url import S3Place
from cluster.messages import Adapter
from node_agent.adapter_memory import fetch, ranges
from node_agent.adapter_memory.fetch import TRIES
from node_agent.adapter_memory.integrity import check_memory
from node_agent.config import DiskCacheConfig
from node_agent.ipc import Evict, Finished
from node_agent.runner.transformers_runner import LoadModel
from node_agent.types import Plan
from tests.node_agent.adapter_world import Turnstile
from tests.node_agent.coldstart.kept import as_started
from tests.support.exact import Case, Tally, check
from tests.support.local_engine import LocalEngine, MakeEngine
from tests.support.peft_reference import ALL_TARGETS, PeftReference, make_adapter
from tests.support.s3_proxy import Fault, Proxy

STORY = [1, *range(50, 90)]
LIMITS = S3Limits(connect=60.0, read=60.0, call=300.0, attempts=2, part=5 << 20)
"""No healthy answer is late for these, however busy the machine is."""
HURRIED = msgspec.structs.replace(LIMITS, read=0.5, call=0.5)
"""For an answer that never comes whole."""
ALWAYS = 1000
LAYER = 2
"""The one whose reads fail."""
KINDS = ["reset", "refuse", "stall", "cut", "drip", "flip", "whole"]
ENDLESS = ("stall", "drip")


@pytest.fixture(scope="module")
def directories(stories_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two adapters of everything in every layer, the first the smaller one."""
    root = tmp_path_factory.mktemp("faults")
    return [
        make_adapter(stories_dir, root / f"r{r}", r, r=r, lora_alpha=r, target_modules=ALL_TARGETS) for r in (7, 24)
    ]


@pytest.fixture(scope="module")
def proxy(s3_endpoint: str) -> Iterator[Proxy]:
    with Proxy(s3_endpoint) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def faulty_stores(proxy: Proxy) -> tuple[S3Store, S3Store]:
    """Behind the proxy, the second one hurried. For all tests: to make one takes longer than a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
        return S3Store(S3Place("garnish-tests"), LIMITS), S3Store(S3Place("garnish-tests"), HURRIED)


@pytest.fixture(scope="module")
def kept(s3_endpoint: str, stories_dir: Path, load_stories: LoadModel) -> Iterator[LocalEngine]:
    """An engine whose registry is on S3. Tests get it by `far`."""
    engine = LocalEngine(
        stories_dir, f"s3://garnish-tests/{uuid.uuid4().hex}", load=load_stories, prefix_cache="auto", dtype="float32",
        threads=1, adapter_memory=8 << 20, host_memory=32 << 20, kv_memory=32 << 20, cpu_workers=0,
    )  # fmt: skip
    with closing(engine):
        yield engine


@pytest.fixture
def far(
    request: pytest.FixtureRequest,
    kept: LocalEngine,
    proxy: Proxy,
    faulty_stores: tuple[S3Store, S3Store],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[LocalEngine]:
    """An engine whose registry is on S3; it reads through the proxy, layer by layer, and computes as layers come."""
    monkeypatch.setattr(ranges, "FIRST_RANGE", 1)
    monkeypatch.setattr(ranges, "LARGEST_RANGE", 1 << 20)
    monkeypatch.setattr(fetch, "BACK_OFF", 0.005)
    proxy.faults, proxy.requests = [], []
    with as_started(kept, monkeypatch) as engine:
        kind = request.getfixturevalue("kind") if "kind" in request.fixturenames else None
        store = faulty_stores[kind in ENDLESS]
        assert isinstance(engine.registry.store, S3Store)
        store.place = engine.registry.store.place
        monkeypatch.setattr(engine.engine.store.loader, "store", store)
        monkeypatch.setattr(engine.engine.cold_start, "plan", lambda lease, n_tokens, ahead: Plan("pipeline"))
        yield engine


def range_of(engine: LocalEngine, adapter: Adapter, layer: int) -> str:
    """The start of the Range header that asks for this layer."""
    return f"bytes={read_header(engine.registry.store, adapter.artifact).layers[layer].offset}-"


def ended(engine: LocalEngine, request: str) -> Finished:
    finished = engine.outcomes[request].finished
    assert finished is not None
    return finished


def is_exact(engine: LocalEngine, reference: PeftReference, directory: Path, request: str, count: int = 4) -> bool:
    case = Case(directory, None, STORY, count)
    return not check(engine, reference, case, engine.outcomes[request].tokens, Tally())


def step_until(engine: LocalEngine, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        engine.step()
        assert time.monotonic() < deadline


def assert_empty(engine: LocalEngine) -> None:
    """Nothing is left of a load that failed, on either tier."""
    store = engine.engine.store
    store.hosts.failure_memory = 0
    step_until(engine, lambda: not store.hosts.used and store.pool.free_bytes == store.pool.size)
    assert check_memory(store) == []


@pytest.mark.parametrize("kind", [*KINDS, "trickle"])
def test_a_read_that_fails_once_costs_time_and_no_token(
    far: LocalEngine, reference: PeftReference, directories: list[Path], proxy: Proxy, kind: str
) -> None:
    """Slow, stalled, short, refused or wrong: the layer is read again."""
    adapter = far.deploy(directories[0])
    proxy.faults = [Fault(kind, range_of(far, adapter, LAYER), status=503, code="SlowDown")]
    request = far.submit(STORY, 4, adapter, ignore_eos=True)
    far.run()
    assert proxy.faults[0].times == 0
    assert ended(far, request).reason == "length"
    assert ended(far, request).cold_start.state == "absent"
    assert is_exact(far, reference, directories[0], request)


@pytest.mark.parametrize("kind", KINDS)
def test_a_read_that_fails_for_good_ends_the_request_and_nobody_elses(
    far: LocalEngine, reference: PeftReference, directories: list[Path], proxy: Proxy, kind: str
) -> None:
    """In the midst of its pass: the layers before are computed by then. Tried again with pauses, then given up; the
    next call begins anew."""
    adapter = far.deploy(directories[0])
    fault = Fault(kind, range_of(far, adapter, LAYER), times=ALWAYS)
    proxy.faults = [fault]
    request = far.submit(STORY, 4, adapter, ignore_eos=True)
    far.run(until=lambda: any(cold.run.layer == LAYER for cold in far.engine.cold.open))
    other = far.submit(STORY, 4, ignore_eos=True)
    far.run()
    finished = ended(far, request)
    assert (finished.reason, finished.error_type) == ("error", "unavailable")
    assert far.outcomes[request].tokens == []
    assert len(far.outcomes[other].tokens) == 4
    tried = ALWAYS - fault.times
    assert tried == TRIES if kind == "flip" else TRIES <= tried <= TRIES * LIMITS.attempts
    assert_empty(far)
    proxy.faults = []
    again = far.submit(STORY, 4, adapter, ignore_eos=True)
    far.run()
    assert is_exact(far, reference, directories[0], again)


@pytest.mark.parametrize("kind", ["reset", "cut", "flip"])
def test_a_header_that_can_not_be_read(
    far: LocalEngine, reference: PeftReference, directories: list[Path], proxy: Proxy, kind: str
) -> None:
    adapter = far.deploy(directories[0])
    fault = Fault(kind, "bytes=0-", times=ALWAYS, at=60)
    proxy.faults = [fault]
    request = far.submit(STORY, 4, adapter)
    far.run()
    assert ended(far, request).error_type == "unavailable"
    assert fault.times < ALWAYS
    assert_empty(far)
    proxy.faults = []
    again = far.submit(STORY, 4, adapter, ignore_eos=True)
    far.run()
    assert is_exact(far, reference, directories[0], again)


def test_a_full_disk_costs_no_answer(
    make_engine: MakeEngine, reference: PeftReference, directories: list[Path], tmp_path: Path
) -> None:
    engine = make_engine(disk_cache=DiskCacheConfig(str(tmp_path / "cache"), 1 << 30))
    adapter, cache = engine.deploy(directories[0]), engine.engine.store.cache
    assert cache is not None
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # the kernel refuses larger files, as on a full disk
    try:
        request = engine.submit(STORY, 4, adapter, ignore_eos=True)
        engine.run(until=lambda: bool(engine.outcomes[request].finished and cache.failures))
        engine.run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert is_exact(engine, reference, directories[0], request)
    assert (cache.failures, list(cache.directory.iterdir())) == (1, [])


def test_host_memory_for_one_adapter_at_a_time(
    make_engine: MakeEngine, reference: PeftReference, directories: list[Path]
) -> None:
    """The second load waits for the first one's room; one that can never fit is refused, with both sizes."""
    engine = make_engine(cold_start="pipeline", cpu_workers=0)
    adapters, store = [engine.deploy(path) for path in directories], engine.engine.store
    for adapter in adapters:
        engine.submit(STORY, 1, adapter)
        engine.run()
    sizes = [store.hosts.get(adapter.digest).size for adapter in adapters]  # type: ignore[union-attr]
    for adapter in adapters:
        assert engine.ask(Evict("e", adapter.digest)).tier == "absent"
    store.hosts.memory = max(sizes)
    requests = [engine.submit(STORY, 4, adapter, ignore_eos=True) for adapter in adapters]
    used = 0
    while engine.engine.busy:
        engine.step()
        used = max(used, store.hosts.used)
    assert used <= max(sizes)
    assert all(is_exact(engine, reference, *pair) for pair in zip(directories, requests, strict=True))
    for adapter in adapters:
        engine.ask(Evict("e", adapter.digest))
    store.hosts.memory = sizes[0]
    small, large = (engine.submit(STORY, 4, adapter, ignore_eos=True) for adapter in adapters)
    engine.run()
    assert is_exact(engine, reference, directories[0], small)
    finished = ended(engine, large)
    assert (finished.error_type, engine.outcomes[large].tokens) == ("too_large", [])
    assert f"needs {sizes[1]} bytes of adapter memory; this node has {sizes[0]}" in finished.error


@pytest.mark.parametrize("arrived", [1, 4])
@pytest.mark.parametrize("someone_else", [False, True])
def test_a_caller_that_leaves_during_a_load(
    far: LocalEngine,
    reference: PeftReference,
    directories: list[Path],
    arrived: int,
    someone_else: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The load goes on for someone else, or when it is nearly done; otherwise it ends, and the next one begins anew."""
    adapter, store = far.deploy(directories[0]), far.engine.store
    offsets = [block.offset for block in read_header(far.registry.store, adapter.artifact).layers]
    turnstile = Turnstile(far.registry.store)  # patient: no read is made twice because the host is slow
    monkeypatch.setattr(store.loader, "store", turnstile)
    try:
        request = far.submit(STORY, 4, adapter)
        other = far.submit(STORY, 4, adapter, ignore_eos=True) if someone_else else None
        for offset in offsets[:arrived]:
            turnstile.let(offset)
        far.run(until=lambda: any(cold.run.layer == arrived for cold in far.engine.cold.open))
        far.engine.cancel(request)
        far.step()
        given_up = not (someone_else or arrived == 4)
        step_until(far, lambda: bool(store.device) != given_up)
    finally:
        turnstile.open_all()
    if other is not None:
        far.run()
        assert is_exact(far, reference, directories[0], other)
        assert sorted(turnstile.reads) == offsets
    elif arrived == 4:
        step_until(far, lambda: store.ready(adapter.digest))
        assert sorted(turnstile.reads) == offsets
    else:
        assert_empty(far)
        assert len(turnstile.reads) < len(offsets)
    again = far.submit(STORY, 4, adapter, ignore_eos=True)
    far.run()
    assert is_exact(far, reference, directories[0], again)
    assert (ended(far, again).cold_start.state == "absent") == given_up


@pytest.mark.parametrize("change", ["delete", "redeploy"])
def test_a_function_that_changes_during_its_cold_start(
    far: LocalEngine, reference: PeftReference, directories: list[Path], change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is that of the version which the name meant when the call came."""
    adapter, store = far.deploy(directories[0], "f"), far.engine.store
    turnstile = Turnstile(far.registry.store)  # patient: no read is made twice because the host is slow
    monkeypatch.setattr(store.loader, "store", turnstile)
    try:
        request = far.submit(STORY, 4, adapter, ignore_eos=True)
        turnstile.let(read_header(far.registry.store, adapter.artifact).layers[0].offset)
        far.run(until=lambda: bool(far.engine.cold.open) and far.engine.cold.open[0].run.layer == 1)
        later = None
        if change == "delete":
            far.registry.delete_function("test", "f")
        else:
            later = far.submit(STORY, 4, far.deploy(directories[1], "f"), ignore_eos=True)
    finally:
        turnstile.open_all()
    far.run()
    assert is_exact(far, reference, directories[0], request)
    if later is not None:
        assert is_exact(far, reference, directories[1], later)
