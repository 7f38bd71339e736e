"""An engine in this process over a registry in a directory: what tests and in-process benchmarks drive."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adapters.base_model import load_base_model
from adapters.deployment import AdapterUpload
from adapters.open_store import open_store
from adapters.registry import Registry
from cluster.messages import Adapter, GenerateRequest, Sampling
from node_agent.config import EngineConfig
from node_agent.engine.setup import build_engine, find_runner
from node_agent.ipc import Admitted, Answer, Finished, Generated, PromptScored, Question, Top
from node_agent.types import OpenRunner

GREEDY = Sampling(temperature=0.0)


@dataclass
class Outcome:
    """What the engine said about one request."""

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    prompt_scores: list[Top] = field(default_factory=list)
    """of the prompt's tokens but the first"""
    admitted: str = ""
    cached_tokens: int = 0
    finished: Finished | None = None


def deploy_adapter(registry: Registry, directory: Path, name: str | None = None) -> Adapter:
    """Deploys an adapter as a function of the tenant `test`. Returns it as nodes get it."""
    function = (name or directory.name).lower()
    config = (directory / "adapter_config.json").read_bytes()
    registry.deploy("test", function, AdapterUpload(config, directory / "adapter_model.safetensors"))
    found = registry.resolve("test", function, None)
    return Adapter(
        found.digest,
        found.artifact_key,
        found.bytes,
        tuple(found.ranks),
        config=found.config_sha256,
        weights=found.weights_sha256,
    )


class LocalEngine:
    """Deploys adapters through the real registry and collects what the engine answers."""

    def __init__(
        self,
        model_dir: Path,
        registry: Path | str,
        load: Callable[..., Any] | None = None,
        on_change: Callable[[], None] = lambda: None,
        open_runner: OpenRunner | None = None,
        **settings: Any,
    ) -> None:
        """`registry`: a directory, or an s3:// URL; `load`: loads the base model in the runner's place; `open_runner`:
        opens another runner than the one that the settings name; `on_change` is called by loads, after every layer.
        What is timed must not depend on what was asked before, so `prefix_cache` is off unless `settings` say so."""
        self.model_dir = model_dir
        self.idle = 0.0005
        """seconds that a step waits at most which finds nothing to do"""
        self._changed = threading.Event()
        self.registry = Registry(open_store(str(registry)), load_base_model(model_dir))
        settings = {"prefix_cache": "off"} | settings
        self.config = EngineConfig(model_dir=str(model_dir), base_id=model_dir.name, registry=str(registry), **settings)

        def change() -> None:
            self._changed.set()
            on_change()

        self.engine, self.base = build_engine(self.config, change, open_runner or _opener(self.config.runner, load))
        self.outcomes: dict[str, Outcome] = {}
        self.answers: dict[str, Answer] = {}
        self._count = 0

    def deploy(self, directory: Path, name: str | None = None) -> Adapter:
        return deploy_adapter(self.registry, directory, name)

    def submit(
        self,
        tokens: list[int],
        max_tokens: int,
        adapter: Adapter | None = None,
        sampling: Sampling = GREEDY,
        timeout: float = 300.0,
        ignore_eos: bool = False,
        tenant: str = "test",
        **owner: Any,
    ) -> str:
        """`owner`: further fields of GenerateRequest: function, weight, slo_class, ttft, tpot."""
        self._count += 1
        request = f"r{self._count}"
        self.outcomes[request] = Outcome()
        self.engine.submit(
            GenerateRequest(
                request, "", tenant, tokens, max_tokens, sampling, timeout, adapter, ignore_eos=ignore_eos, **owner
            )
        )
        return request

    def step(self) -> bool:
        """One iteration, as the engine process has it; what it said is booked in `outcomes`. False when there was
        nothing to compute."""
        self.engine.prepare()
        used = self.engine.compute_cold()
        told, worked = self.book(), used > 0
        for _ in self.engine.compute_hot(used):
            worked = True
            told |= self.book()
        if not (worked or told):  # a load is on its way; a loop that spins would take the loader's time
            self._changed.wait(self.idle)
            self._changed.clear()
        return worked

    def book(self) -> bool:
        """False: nothing was said."""
        now = time.perf_counter()
        events = self.engine.take_events()
        for event in events:
            if isinstance(event, Generated):
                outcome = self.outcomes[event.id]
                outcome.tokens.append(event.token_id)
                outcome.times.append(now)
                outcome.logprobs.append(event.top)
            elif isinstance(event, PromptScored):
                outcome = self.outcomes[event.id]
                assert event.index == len(outcome.prompt_scores) + 1, "a token was scored twice, or not at all"
                outcome.prompt_scores += event.scores
            elif isinstance(event, Admitted):
                self.outcomes[event.id].admitted = event.state
            elif isinstance(event, Finished):
                outcome = self.outcomes[event.id]
                outcome.finished, outcome.cached_tokens = event, event.cached_tokens
            elif isinstance(event, Answer):
                self.answers[event.id] = event
        return bool(events)

    def run(self, until: Callable[[], bool] | None = None, limit: float = 300.0) -> None:
        """Step until nothing is in flight (or `until` holds). Raises TimeoutError after `limit` seconds."""
        deadline = time.monotonic() + limit
        self.step()
        while self.engine.busy and not (until is not None and until()):
            self.step()
            if time.monotonic() > deadline:
                raise TimeoutError(f"requests still run after {limit} s")

    def ask(self, question: Question, limit: float = 60.0) -> Answer:
        """Step until the question is answered. Raises TimeoutError."""
        self.engine.answer(question)
        deadline = time.monotonic() + limit
        while question.id not in self.answers:
            self.step()
            if time.monotonic() > deadline:
                raise TimeoutError(f"no answer after {limit} s")
        return self.answers.pop(question.id)

    def results(self, requests: Iterable[str]) -> list[list[int]]:
        return [self.outcomes[request].tokens for request in requests]

    def assert_clean(self) -> None:
        """Nothing is held when nothing runs: no KV block, lease, queue entry, open pass or pending release."""
        self.engine.step()
        self.engine.take_events()
        held = {
            "queue": len(self.engine.queue),
            "running": len(self.engine.running),
            "cold passes": len(self.engine.cold.open),
            "kv blocks": self.engine.blocks.total - self.engine.blocks.free,
            "leases": self.engine.store.leases,
        }
        if any(held.values()):
            raise AssertionError(f"the engine still holds {held}")

    def end(self) -> None:
        """Cancels all that is in flight; nothing is held then."""
        self.engine.cancel_all()
        self.run()
        self.assert_clean()

    def close(self) -> None:
        self.engine.close()


def _opener(runner: str, load: Callable[..., Any] | None) -> OpenRunner | None:
    """None: the runner loads the base model itself."""
    if load is None:
        return None
    open_runner: Any = find_runner(runner)
    return lambda settings: open_runner(settings, load=load)


MakeEngine = Callable[..., LocalEngine]
"""(model_dir=None, registry=None, **EngineConfig fields) -> LocalEngine"""
