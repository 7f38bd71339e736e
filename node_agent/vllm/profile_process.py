"""Thorough measurement of a node with vLLM: `python -m node_agent.vllm.profile_process`, with settings on standard
input. It runs in the environment that has vLLM, and writes what node_agent.profile_process writes, without a cold-start
profile."""

from __future__ import annotations

import sys
from pathlib import Path

from node_agent.vllm.logs import set_up_environment, take_logs
from node_agent.vllm.spawned import begin_spawned

if __name__ == "__mp_main__":
    begin_spawned()

from adapters.base_manifest import find_base
from adapters.errors import StoreUnavailable
from adapters.open_store import open_store
from cluster.lifeline import die_with_parent
from cluster.performance_file import write_performance
from cluster.performance_fit import BadFit, BadSample
from node_agent.child import read_config, take_output
from node_agent.collector import end
from node_agent.config import ProfileProcessConfig
from node_agent.engine_channel import WakeUp
from node_agent.measured import Failed, Measured, Step
from node_agent.performance.idle_base import MeasurementFailed
from node_agent.performance.repeats import SweepTooSlow
from node_agent.performance.stored import performance_file
from node_agent.vllm.engine import VllmDied
from node_agent.vllm.measuring.thorough import measure_performance
from node_agent.vllm.process import build_engine, kill_vllm, set_environment


def main() -> int:
    settings = read_config(ProfileProcessConfig)
    die_with_parent(settings.parent)
    config = settings.engine
    report = take_output()
    set_up_environment()
    take_logs(process="profile")
    assert config.profile is not None  # the command line sets it
    report(Step("starting vLLM"))
    set_environment(config)
    try:
        base = find_base(Path(config.model_dir), config.base_id, open_store(config.registry))
        engine, _, conditions = build_engine(config, base, WakeUp())
    except Exception as error:  # any error of vLLM's start
        report(Failed(str(error) or type(error).__name__))
        kill_vllm()
        return 1
    try:
        measured = measure_performance(engine, config, conditions, lambda text, share: report(Step(text, share)))
        write_performance(measured, performance_file(config.profile))
    except (BadFit, BadSample, SweepTooSlow, MeasurementFailed, VllmDied, StoreUnavailable, OSError) as error:
        report(Failed(str(error)))
        return 1
    finally:
        engine.close()
        kill_vllm()
    report(Measured(None, measured))
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    end(code)  # at once: threads of vLLM may stand still
