"""Nodes of both engines behind one gateway: answers that move between them, versions, deploys, operators, upgrades."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.e2e.whole_service import eventually
from tests.support.peft_reference import Greedy, PeftReference
from tests.vllm.mixed_pool import OWN, ROOT, VLLM, Callers, MixedPool, Reply
from tests.vllm.test_vllm_races import agrees
from tests.vllm.vllm_process import name_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(3600)]
PROMPT = "Once upon a time"
LONG, SHORT = 400, 12
PACKAGES = ("adapters", "cluster", "garnish", "gateway", "infra", "kernels", "node_agent")
LAST_FIELD = (
    "    vllm: VllmLoad | None = None\n"
    '    """vLLM\'s own figures. None: the node\'s engine is another one, or is not ready."""\n'
)
"""End of a message that is an array, in which new fields come last."""
NEW_FIELD = ("cluster/news.py", LAST_FIELD, f"{LAST_FIELD}    later: int = 7\n")
"""Field of a message that only the other build knows."""


@pytest.fixture(scope="module")
def pool(python: Path, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MixedPool]:
    """Both nodes are ready at the beginning of each test."""
    with MixedPool(tmp_path_factory.mktemp("mixed"), base, python) as running:
        running.start(OWN, VLLM)
        yield running


@pytest.fixture
def expected(base: Path, peft: PeftReference) -> Callable[[Path | None, int], Greedy]:
    """Returns PEFT's tokens after PROMPT."""
    ids = Tokenizer.from_file(str(base / "tokenizer.json")).encode(PROMPT).ids
    return lambda directory, count: peft.greedy(directory, ids, count)


def is_whole(reply: Reply, right: Greedy) -> bool:
    return len(reply.tokens) == len(right.tokens) and agrees(reply.tokens, right)


def worker(pool: MixedPool) -> int:
    """Returns the process id of vLLM's worker."""
    (found,) = [pid for pid in pool.processes(VLLM) if name_of(pid).startswith("VLLM::Worker")]
    return found


Expected = Callable[[Path | None, int], Greedy]


def test_an_answer_moves_to_vllm_and_back(pool: MixedPool, adapter_dirs: list[Path], expected: Expected) -> None:
    """Both of its nodes are killed in the midst of it; the caller reads what PEFT writes."""
    pool.deploy("moved", adapter_dirs[0])
    pool.drain(VLLM)
    stream = pool.stream("moved", prompt=PROMPT, max_tokens=LONG)
    stream.wait_for_tokens(5)
    pool.undrain(VLLM)
    at = len(stream.reply.tokens)
    pool.kill(OWN)
    stream.wait_for_tokens(at + 10)
    held = worker(pool)
    os.kill(held, signal.SIGSTOP)  # the answer is not to end before our engine is there again
    try:
        pool.start(OWN)
    finally:
        os.kill(held, signal.SIGCONT)
    stream.wait_for_tokens(len(stream.reply.tokens) + 5)
    pool.kill(VLLM)
    reply = stream.result()
    assert reply.node == OWN and reply.resumed == 2
    assert reply.last["usage"]["completion_tokens"] == LONG
    assert is_whole(reply, expected(adapter_dirs[0], LONG))
    pool.start(VLLM)


def test_sampled_text_goes_on_with_the_other_engine(pool: MixedPool, adapter_dirs: list[Path]) -> None:
    pool.deploy("sampled", adapter_dirs[1])
    pool.drain(OWN)
    stream = pool.stream("sampled", prompt=PROMPT, max_tokens=LONG, temperature=0.8, seed=7)
    stream.wait_for_tokens(5)
    pool.undrain(OWN)
    pool.kill(VLLM)
    reply = stream.result()
    assert reply.node == VLLM and reply.resumed == 1
    assert len(reply.tokens) == reply.last["usage"]["completion_tokens"] == LONG
    pool.start(VLLM)


def test_streams_keep_their_version_while_an_alias_moves(
    pool: MixedPool, adapter_dirs: list[Path], expected: Expected
) -> None:
    """More streams than vLLM has slots for their adapters: of two versions, and of another function."""
    first, second, other = adapter_dirs[2:5]
    for directory in (first, second):
        pool.deploy("moving", directory)
    pool.deploy("other", other)
    pool.point("moving", "prod", 1)
    pool.drain(OWN)
    before = [pool.stream("moving:prod", prompt=PROMPT, max_tokens=LONG) for _ in range(3)]
    aside = pool.stream("other", prompt=PROMPT, max_tokens=LONG)
    for stream in before:
        stream.wait_for_tokens(3)
    pool.point("moving", "prod", 2)
    assert all(stream.is_alive() for stream in before), "they are in the midst of their answers"
    after = [pool.stream("moving:prod", prompt=PROMPT, max_tokens=SHORT) for _ in range(3)]
    for streams, version, directory, count in ((before, 1, first, LONG), (after, 2, second, SHORT)):
        for stream in streams:
            reply = stream.result()
            assert (reply.node, reply.version) == (VLLM, version)
            assert is_whole(reply, expected(directory, count))
    assert is_whole(aside.result(), expected(other, LONG))
    pool.undrain(OWN)


def test_deploys_under_load_disturb_no_call(pool: MixedPool, adapter_dirs: list[Path], expected: Expected) -> None:
    """vLLM alone serves; each new function's adapter is called at once, and evicts another from its slot."""
    pool.drain(OWN)
    pool.deploy("steady-0", adapter_dirs[0])
    pool.deploy("steady-1", adapter_dirs[1])
    rights = [expected(directory, SHORT) for directory in adapter_dirs]
    base = expected(None, SHORT)
    body = {"prompt": PROMPT, "max_tokens": SHORT}
    calls = {
        f"steady-{at}": (body, lambda reply, right=rights[at]: is_whole(reply, right)) for at in range(2)
    }  # fmt: skip
    calls[pool.base.name] = (body, lambda reply: is_whole(reply, base))
    with Callers(pool, calls) as callers:
        callers.go_on(3)
        for at, directory in enumerate(adapter_dirs):
            assert pool.deploy(f"new-{at}", directory)["version"] == 1
            reply = pool.stream(f"new-{at}", **body).result()
            assert reply.node == VLLM and is_whole(reply, rights[at])
        callers.go_on(3)
    assert not callers.wrong and callers.nodes == {VLLM}
    pool.undrain(OWN)


def test_operators_prefetch_and_evict_and_drain(pool: MixedPool, adapter_dirs: list[Path], expected: Expected) -> None:
    digest = pool.deploy("fetched", adapter_dirs[5])["digest"]

    def tier() -> str:
        return next((str(each["tier"]) for each in pool.residents(VLLM) if each["digest"] == digest), "absent")

    def order(kind: str) -> None:
        with pool.service.client() as http:
            response = http.post(f"/nodes/{VLLM}/{kind}", json={"digest": digest})
        assert response.is_success, response.text

    order("prefetch")
    assert eventually(lambda: tier() == "device", 60), pool.residents(VLLM)
    pool.drain(OWN)
    call = {"prompt": PROMPT, "max_tokens": LONG}
    stream = pool.stream("fetched", **call)
    stream.wait_for_tokens(3)
    pool.undrain(OWN)
    pool.drain(VLLM)
    later = pool.stream("fetched", **call).result()
    reply = stream.result()
    assert (reply.node, later.node) == (VLLM, OWN)
    assert reply.last["timing"]["cold_start"]["state"] == "none"
    assert is_whole(reply, expected(adapter_dirs[5], LONG)) and is_whole(later, expected(adapter_dirs[5], LONG))
    pool.undrain(VLLM)
    assert eventually(lambda: not any(each["in_use"] for each in pool.residents(VLLM)))
    order("evict")
    assert eventually(lambda: tier() == "absent")


@pytest.fixture
def other_build(tmp_path: Path) -> Path:
    """A build of the same protocol version, one of whose messages has another field."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    name, before, after = NEW_FIELD
    text = (tmp_path / name).read_text()
    assert text.count(before) == 1
    (tmp_path / name).write_text(text.replace(before, after))
    return tmp_path


def test_a_rolling_upgrade_fails_no_call(
    pool: MixedPool, adapter_dirs: list[Path], expected: Expected, other_build: Path
) -> None:
    """vLLM's node first, then our engine's, and back; each serves alone meanwhile."""
    pool.deploy("kept", adapter_dirs[6])
    right = expected(adapter_dirs[6], SHORT)
    calls = {"kept": ({"prompt": PROMPT, "max_tokens": SHORT}, lambda reply: is_whole(reply, right))}
    with Callers(pool, calls) as callers:
        for tree in (other_build, ROOT):
            for node in (VLLM, OWN):
                callers.go_on(2)
                pool.stop(node)
                callers.go_on(2)
                pool.start(node, tree=tree)
        callers.go_on(2)
    assert not callers.wrong and callers.nodes == {OWN, VLLM}
