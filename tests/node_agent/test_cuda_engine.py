"""The whole engine with `node.runner: cuda` on a CPU: its tokens against those of PEFT."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.messages import Sampling
from node_agent.cores import spare_cores
from node_agent.runner import cuda_runner
from node_agent.runner.cuda_pass import CapturedPass, LayeredPass, PromptPass
from node_agent.runner.cuda_runner import CudaRunner
from node_agent.types import PassLora, Plan, StepBatch
from tests.node_agent.coldstart.held_link import HeldLink
from tests.node_agent.late_stream import SlowStream
from tests.support.draws import draws
from tests.support.exact import Case, Tally, check
from tests.support.local_engine import LocalEngine, MakeEngine
from tests.support.peft_reference import PeftReference

pytestmark = pytest.mark.usefixtures("quick_interpreter")


class Counting(CudaRunner):
    """Says which passes it was asked for."""

    def start(self, batch: StepBatch, lora: PassLora | None) -> CapturedPass | LayeredPass:
        run = super().start(batch, lora)
        self.passes.append((type(run), batch.n_rows, lora is not None))
        return run


@pytest.fixture
def engine(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> LocalEngine:
    """Its captured steps run late."""
    stream = SlowStream()
    monkeypatch.setattr(cuda_runner, "open_stream", lambda _: stream)
    monkeypatch.setattr(cuda_runner, "CudaRunner", Counting)
    Counting.passes = []
    made = make_engine(runner="cuda", chunk_tokens=24, max_rows=8, block_tokens=4, adapter_memory=512 << 10)
    assert isinstance(made.engine.runner, CudaRunner)
    stream.late = True
    return made


@settings(max_examples=draws(2), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_tokens_of_peft(seed: int, engine: LocalEngine, drawn_adapters: list[Path], reference: PeftReference) -> None:
    """Mixed adapters, ranks and the base, prompts of several chunks, arrivals while others decode, cold adapters and
    eviction; a request is cancelled."""
    rng = random.Random(seed)
    cases, requests = [], []
    for _ in range(8):
        path = rng.choice([None, *drawn_adapters])
        prompt = [1, *(rng.randrange(3, 512) for _ in range(rng.randrange(60)))]
        case = Case(path, None if path is None else engine.deploy(path), prompt, rng.randint(1, 10))
        cases.append(case)
        requests.append(engine.submit(prompt, case.max_tokens, case.adapter))
        for _ in range(rng.randrange(4)):
            engine.step()
    engine.engine.cancel(requests.pop())
    engine.run()
    assert isinstance(engine.engine.runner.stream, SlowStream) and "wait" in engine.engine.runner.stream.log
    tally = Tally()
    for case, request_id in zip(cases, requests, strict=False):
        assert engine.outcomes[request_id].finished is not None
        assert not check(engine, reference, case, engine.outcomes[request_id].tokens, tally)
    assert tally.mismatches == 0


def test_which_passes_are_captured(engine: LocalEngine, drawn_adapters: list[Path]) -> None:
    adapter = engine.deploy(drawn_adapters[0])
    for _ in range(2):  # the second time the adapter is there
        Counting.passes.clear()
        for i in range(3):
            engine.submit([1, 30 + i, 31], 5, adapter if i else None)
        engine.run()
    decodes = [entry for entry in Counting.passes if entry[0] is CapturedPass]
    assert (CapturedPass, 3, True) in decodes
    prompts = [entry for entry in Counting.passes if entry[0] is PromptPass]
    assert len(decodes) >= 4 and 1 <= len(prompts) <= 2, Counting.passes
    assert len(decodes) + len(prompts) == len(Counting.passes)


@pytest.mark.skipif(not spare_cores(1), reason="a CPU worker needs a core beside the engine's")
def test_rows_whose_adapter_is_on_its_way(
    make_engine: MakeEngine, drawn_adapters: list[Path], reference: PeftReference
) -> None:
    """A CPU worker computes a prompt and decode steps, beside rows of the base, which are captured when they are
    alone; then the adapter arrives."""
    engine = make_engine(runner="cuda", cpu_workers=1, max_rows=4, chunk_tokens=64)
    layers, starts = engine.base.num_layers, engine.engine.cold_start
    starts.plan = lambda lease, n_tokens, ahead: Plan("assist", layers, 0.0, (0.0,) * layers, (1.0,) * layers)
    starts.joining = lambda waiting, others: {lease.digest for lease, _ in waiting if starts.can_step(lease)}
    link = HeldLink(engine)
    path = drawn_adapters[0]
    cases = [Case(None, None, [1, 44, 45], 12), Case(path, engine.deploy(path), [1, *range(50, 70)], 10)]
    requests = [engine.submit(case.prompt, case.max_tokens, case.adapter) for case in cases]
    engine.run(lambda: len(engine.outcomes[requests[1]].tokens) == 4)
    link.open()
    engine.run()
    tally = Tally()
    for case, request_id in zip(cases, requests, strict=True):
        assert not check(engine, reference, case, engine.outcomes[request_id].tokens, tally)
    finished = engine.outcomes[requests[1]].finished
    assert finished is not None and finished.cold_start.layers_cpu >= 4 * layers


SAMPLED = [
    Sampling(temperature=0.8, top_p=0.9, seed=3, logprobs=3),
    Sampling(temperature=1.1, top_k=20, seed=4, repetition_penalty=1.2, presence_penalty=0.4),
    Sampling(temperature=0.0, frequency_penalty=0.5, logit_bias={300: 2.0}, min_tokens=4, bad_words=[[280], [290, 7]]),
    Sampling(temperature=0.7, min_p=0.05, seed=5, prompt_logprobs=2),
    Sampling(temperature=0.0, logprobs=0),
]


def test_sampled_requests_say_what_they_say_elsewhere(
    engine: LocalEngine, make_engine: MakeEngine, drawn_adapters: list[Path]
) -> None:
    """Tokens and log probabilities, with all parameters, of both runners."""
    outcomes = []
    for each in (engine, make_engine(chunk_tokens=24, max_rows=8, block_tokens=4)):
        adapter = each.deploy(drawn_adapters[1])
        requests = [
            each.submit([1, *range(40 + i, 75 + i)], 12, adapter if i % 2 else None, way)
            for i, way in enumerate(SAMPLED)
        ]
        each.run()
        outcomes.append([each.outcomes[r] for r in requests])
    for mine, other in zip(*outcomes, strict=True):
        assert mine.tokens == other.tokens
        assert len(mine.prompt_scores) == len(other.prompt_scores)
        for a, b in zip([*mine.logprobs, *mine.prompt_scores], [*other.logprobs, *other.prompt_scores], strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert [token for token, _ in a.top] == [token for token, _ in b.top]
                rank = a.rank or 0
                assert abs(rank - (b.rank or 0)) <= max(2, rank // 50)  # tokens lie closer together further down
                assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


def test_diverged_rows_end_with_an_error(engine: LocalEngine) -> None:
    runner = engine.engine.runner
    assert isinstance(runner, CudaRunner)
    good = engine.submit([1, 40, 41], 6)
    bad = engine.submit([1, 50, 51], 6)
    engine.step()
    blocks = engine.engine.running[bad].blocks
    for layer in runner.decoder.layers:
        layer.cache.values[blocks[0] * runner.block_tokens] = float("nan")
    engine.run()
    finished = engine.outcomes[bad].finished
    assert finished is not None and finished.error == "the model's output was not finite"
    assert len(engine.outcomes[good].tokens) == 6
