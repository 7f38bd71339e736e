"""Measures a vLLM for benchmarks.perfmodel.vllm_model, in the environment that has vLLM: settings on standard input,
steps and the result as lines of JSON on standard output."""

from __future__ import annotations

from pathlib import Path

from node_agent.vllm.logs import set_up_environment, take_logs
from node_agent.vllm.spawned import begin_spawned

if __name__ == "__mp_main__":
    begin_spawned()

import msgspec

from adapters.base_manifest import find_base
from adapters.open_store import open_store
from cluster.lifeline import die_with_parent
from cluster.performance_fit import DecodeFit, PrefillFit
from cluster.performance_model import ModelKey, Transfer
from node_agent.child import read_config, take_output
from node_agent.collector import end
from node_agent.config import EngineConfig
from node_agent.engine_channel import WakeUp
from node_agent.measured import Step
from node_agent.performance.cases import Effort
from node_agent.vllm.measuring.samples import counted, decode_fits, fit_loads, prefill_fits, same_contexts
from node_agent.vllm.measuring.thorough import run_cases
from node_agent.vllm.process import build_engine, kill_vllm, set_environment

WHATEVER = float("inf")
"""The study reports a bad fit; only a node refuses it."""


class Job(msgspec.Struct, frozen=True):
    """Settings of the measurement."""

    parent: int
    engine: EngineConfig
    effort: Effort
    budget: float
    """maximum seconds that cases are run"""


class Fitted(msgspec.Struct, frozen=True, tag="fitted"):
    """Message with the fits. Keys are `padded_rank`: 0 and `max_lora_rank`."""

    key: ModelKey
    decode: dict[str, DecodeFit]
    prefill: dict[str, PrefillFit]
    to_device: Transfer
    loads: int
    rounds: float
    """mean number of runs of a case"""


def main() -> int:
    job = read_config(Job)
    die_with_parent(job.parent)
    report = take_output()
    set_up_environment()
    take_logs(process="profile")
    set_environment(job.engine)
    report(Step("starting vLLM"))
    base = find_base(Path(job.engine.model_dir), job.engine.base_id, open_store(job.engine.registry))
    engine, _, conditions = build_engine(job.engine, base, WakeUp())
    try:
        runs, _ = run_cases(engine, conditions, job.effort, job.budget, lambda text, share: report(Step(text, share)))
    finally:
        engine.close()
        kill_vllm()
    rank = engine.store.limits.max_rank
    decode = decode_fits(same_contexts(runs, 1.0), rank, WHATEVER)
    prefill = prefill_fits([run for of_case in counted(runs.prefill, 1.0) for run in of_case], rank, WHATEVER)
    report(
        Fitted(
            conditions.key,
            {str(padded): fit for padded, fit in decode.items() if not isinstance(fit, ValueError)},
            {str(padded): fit for padded, fit in prefill.items() if not isinstance(fit, ValueError)},
            fit_loads(runs.loads),
            len(runs.loads),
            runs.count / max(1, len(runs.decode) + len(runs.prefill)),
        )
    )
    return 0


if __name__ == "__main__":
    end(main())
