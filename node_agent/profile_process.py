"""Thorough measurement of a node's profile: `python -m node_agent.profile_process`, with settings on standard input.

Writes the files of the cold-start profile and of the performance model. Writes one JSON object per line to standard
output: each step when it begins, then both results.
"""

from __future__ import annotations

import sys
from pathlib import Path

from adapters.errors import StoreUnavailable
from cluster.json_file import write_json
from cluster.logs import set_up_logging
from cluster.performance_file import write_performance
from cluster.performance_fit import BadFit, BadSample
from node_agent.child import die_with_parent, read_config, take_output
from node_agent.config import ProfileProcessConfig
from node_agent.measured import Failed, Measured, Step
from node_agent.performance.repeats import SweepTooSlow
from node_agent.performance.stored import performance_file


def main() -> int:
    settings = read_config(ProfileProcessConfig)
    die_with_parent(settings.parent)
    config = settings.engine
    set_up_logging("profile")
    report = take_output()

    from node_agent.coldstart.measure import LONG, measure
    from node_agent.coldstart.profile import ProfileError, check
    from node_agent.coldstart.setup import profile_key
    from node_agent.device import flush_denormals
    from node_agent.engine.setup import build_engine
    from node_agent.performance.setup import measure_performance

    flush_denormals()  # like the engine process
    assert config.profile is not None  # the command line sets it
    report(Step("loading the base model"))
    try:
        engine, base = build_engine(config, lambda: None)
    except (OSError, ValueError) as error:
        report(Failed(str(error)))
        return 1
    workers = engine.assist.workers if engine.assist is not None else None
    key = profile_key(engine, config, base, 0 if workers is None else workers.layout.workers)
    cold = measure(
        key, engine.runner, engine.blocks, engine.store, workers, LONG, lambda text: report(Step(f"measuring {text}"))
    )
    try:
        check(cold)
        write_json(cold, Path(config.profile))
        performance = measure_performance(engine, config, base, lambda text, share: report(Step(text, share)))
        write_performance(performance, performance_file(config.profile))
    except (OSError, ProfileError) as error:
        report(Failed(str(error)))
        return 1
    except (BadFit, BadSample, SweepTooSlow, StoreUnavailable) as error:
        report(Failed(f"its performance model: {error} (Its cold-start profile is written.)"))
        return 1
    finally:
        engine.close()
    report(Measured(cold, performance))
    return 0


if __name__ == "__main__":
    sys.exit(main())
