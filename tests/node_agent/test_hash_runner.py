"""The runner without a model: engines on it answer as its reference does, and are driven as the real runner is."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cluster.messages import Adapter, Sampling
from node_agent.config import LinkConfig
from node_agent.runner import transformers_runner
from node_agent.runner.transformers_runner import LoadModel
from node_agent.types import ModelRunner, OpenRunner, Pass, PassLora, RunnerSettings, StepBatch, StepOutput
from tests.support.hash_runner import ADAPTER_TARGETS, HashReference, open_runner, write_adapter
from tests.support.local_engine import LocalEngine

BATCHES = 20
SIZES: dict[str, Any] = {"block_tokens": 4, "max_rows": 6, "threads": 1, "dtype": "float32", "cpu_workers": 0}
"""A model that takes no time has an engine start CPU workers wherever it may, which takes seconds."""


@dataclass(frozen=True)
class Function:
    directory: Path | None
    adapter: Adapter | None


def functions(engine: LocalEngine, folder: Path, count: int) -> list[Function]:
    """Deploys `count` adapters of drawn shapes; the first function is the base's."""
    rng, found = random.Random(3), [Function(None, None)]
    for number in range(count):
        targets = rng.sample(ADAPTER_TARGETS, rng.randint(1, 7))
        path = write_adapter(engine.base, folder / f"f{number}", number, rng.choice([1, 3, 8, 16]), targets)
        found.append(Function(path, engine.deploy(path)))
    return found


def drawn_prompt(rng: random.Random, earlier: list[list[int]]) -> list[int]:
    """Draws a prompt; half of them begin as an earlier one."""
    prompt = [rng.randrange(3, 500) for _ in range(rng.randint(1, 50))]
    if earlier and rng.random() < 0.5:
        start = rng.choice(earlier)
        prompt = start[: rng.randint(1, len(start))] + prompt
    return prompt


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"load_link": LinkConfig(1e7), "cpu_workers": None},
        {"load_link": LinkConfig(1e7), "cpu_workers": 1, "cold_start": "assist"},
        {"prefix_cache": "off", "kv_memory": 4 << 20},
    ],
    ids=["defaults", "slow link", "CPU workers", "no prefixes"],
)
def test_answers_are_the_references(hash_dir: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    """Drawn batches that arrive while others run; adapter memory has room for few adapters, and some callers leave."""
    sizes = SIZES | {"prefix_cache": "auto", "adapter_memory": 256 << 10, "host_memory": 8 << 20} | settings
    rng = random.Random(str(settings))
    with closing(LocalEngine(hash_dir, tmp_path / "registry", open_runner=open_runner, **sizes)) as engine:
        reference = HashReference(engine.base, engine.engine.eos_ids)
        known, earlier = functions(engine, tmp_path, 12), list[list[int]]()
        for _ in range(BATCHES):
            engine.engine.limits = replace(engine.engine.limits, chunk_tokens=rng.randint(1, 64))
            wanted: dict[str, list[int]] = {}
            for _ in range(rng.randint(1, 10)):
                function, prompt, count = rng.choice(known), drawn_prompt(rng, earlier), rng.randint(1, 12)
                request = engine.submit(prompt, count, function.adapter)
                earlier.append(prompt)
                if rng.random() < 0.15:
                    engine.engine.cancel(request)
                else:
                    wanted[request] = reference.greedy(function.directory, prompt, count)
                for _ in range(rng.randint(0, 3)):
                    engine.step()
            engine.run()
            engine.assert_clean()
            assert {request: engine.outcomes[request].tokens for request in wanted} == wanted


@dataclass
class Recorder:
    """A runner that notes what it is asked for, and the form of what it answers."""

    runner: ModelRunner
    asked: list[tuple[Any, ...]] = field(default_factory=list)
    blocks: dict[int, int] = field(default_factory=dict)
    """Numbers of KV blocks by their order of first use."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def start(self, batch: StepBatch, lora: PassLora | None) -> Pass:
        generated = batch.n_decode  # tokens of these rows are the runner's own
        self.asked.append(
            (
                batch.token_ids[generated:].tolist(), batch.positions.tolist(), self._tables(batch),
                self._slots(batch), batch.logit_rows.tolist(), batch.query_lens, batch.context_lens,
                batch.sampling, lora is None,
            )
        )  # fmt: skip
        made = self.runner.start(batch, lora)
        finish = made.finish

        def finished() -> StepOutput:
            output = finish()
            self.asked.append(form_of(output))
            return output

        made.finish = finished  # type: ignore[method-assign]
        return made

    def clear(self) -> None:
        self.asked.clear()
        self.blocks.clear()

    def _block(self, number: int) -> int:
        return self.blocks.setdefault(number, len(self.blocks))

    def _tables(self, batch: StepBatch) -> list[list[int]]:
        """Returns each row's blocks, without what pads the table."""
        counts = [-(-context // self.runner.block_tokens) for context in batch.context_lens]
        rows = zip(batch.block_table.tolist(), counts, strict=True)
        return [[self._block(number) for number in row[:count]] for row, count in rows]

    def _slots(self, batch: StepBatch) -> list[tuple[int, int]]:
        """Returns each token's block and its place in that block."""
        size = self.runner.block_tokens
        return [(self._block(slot // size), slot % size) for slot in batch.slot_mapping.tolist()]


Recorded = tuple[LocalEngine, Recorder]


def form_of(output: StepOutput) -> tuple[Any, ...]:
    tops = [None if each is None else len(each[1]) for each in output.logprobs]
    scores = [len(score.top) for score in output.prompt_scores]
    return output.token_ids.shape, output.token_ids.dtype, tops, output.non_finite, scores, output.done.query()


@pytest.fixture
def pair(stories_dir: Path, load_stories: LoadModel, tmp_path: Path) -> Iterator[tuple[Recorded, Recorded]]:
    """The real runner and the one without a model, both on stories260K's shape."""
    sizes = SIZES | {"prefix_cache": "auto", "adapter_memory": 8 << 20, "host_memory": 32 << 20, "kv_memory": 4 << 20}

    def recorded(name: str, open_runner: OpenRunner) -> Recorded:
        recorders: list[Recorder] = []

        def opened(settings: RunnerSettings) -> ModelRunner:
            recorders.append(Recorder(open_runner(settings)))
            return recorders[0]  # type: ignore[return-value]

        engine = LocalEngine(stories_dir, tmp_path / name, open_runner=opened, **sizes)
        return engine, recorders[0]

    real = recorded("real", partial(transformers_runner.open_runner, load=load_stories))
    hashed = recorded("hash", open_runner)
    with closing(real[0]), closing(hashed[0]):
        yield real, hashed


def test_it_is_driven_as_the_real_one(pair: tuple[Recorded, Recorded], tmp_path: Path) -> None:
    """The same batches, blocks, samplings and forms of answers, over drawn requests of adapters on the device."""
    for number, (engine, recorder) in enumerate(pair):
        of, rng = engine.engine, random.Random(7)
        known, earlier = functions(engine, tmp_path / str(number), 3), list[list[int]]()
        for each in known:
            engine.submit([1, 2, 3], 2, each.adapter, ignore_eos=True)
            engine.run()
            assert each.adapter is None or engine.engine.store.on_device(each.adapter.digest)
        recorder.clear()
        for _ in range(BATCHES):
            of.limits = replace(of.limits, chunk_tokens=rng.randint(1, 64))
            for _ in range(rng.randint(1, 8)):
                earlier.append(drawn_prompt(rng, earlier))
                sampling = rng.choice(
                    [
                        Sampling(temperature=0.0), Sampling(temperature=0.8, top_p=0.9, seed=4),
                        Sampling(temperature=0.0, logprobs=3), Sampling(temperature=0.0, prompt_logprobs=2),
                    ]
                )  # fmt: skip
                engine.submit(earlier[-1], rng.randint(1, 12), rng.choice(known).adapter, sampling, ignore_eos=True)
                for _ in range(rng.randint(0, 3)):
                    engine.step()
            engine.run()
            engine.assert_clean()
    (_, real), (_, hashed) = pair
    assert len(real.asked) > 10 * BATCHES
    for ours, theirs in zip(hashed.asked, real.asked, strict=True):
        assert ours == theirs
