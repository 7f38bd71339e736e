"""How many CPU LoRA workers a node starts by itself: by what a load costs here, which cores are left, and how fast the
workers are. Whether the link is a simulated one plays no part.
"""

from __future__ import annotations

from dataclasses import replace

from adapters.base_model import BaseModel
from node_agent.adapter_memory.store import AdapterStore
from node_agent.coldstart.cold_starts import WAYS, ColdStarts, WorkersDecision
from node_agent.coldstart.costs import pipelined_costs
from node_agent.coldstart.planner import choose
from node_agent.coldstart.profile import Profile
from node_agent.coldstart.shared import DTYPES
from node_agent.config import EngineConfig
from node_agent.types import GROUPS

RANK, TARGETS, PROMPT_TOKENS = 64, GROUPS["qkv"], 64
"""Of the call that is judged: a large adapter, behind a short prompt, which hides little."""
LEAST_GAIN = 0.1
"""Of a warm prefill, that such a call's adapter must keep it waiting without workers."""
MOST_WORKERS = 16
"""A prompt's slices fill no more."""
TOO_SLOW = WorkersDecision(0, "they are slower than the load is: prompts are pipelined")


def decide_workers(
    config: EngineConfig, store: AdapterStore, base: BaseModel, profile: Profile, cores_left: int
) -> WorkersDecision:
    """Returns how many workers the node starts: as many as are set, or by `profile`, its link's and layers' costs."""
    if "assist" not in WAYS[config.cold_start].plans:
        return WorkersDecision(0, f"cold_start: {config.cold_start} has no use for them")
    if config.cpu_workers is not None:
        return WorkersDecision(config.cpu_workers, "as set")
    if config.host_nodes > 1:
        return WorkersDecision(0, f"{config.host_nodes} nodes share this host's cores")
    if store.pool.data.dtype not in DTYPES:
        return WorkersDecision(0, f"they compute in {' or '.join(map(str, DTYPES))}, not {store.pool.data.dtype}")
    if store.pool.data.device.type != "cpu":
        return WorkersDecision(0, "a GPU's own link is faster than they are; cpu_workers: N starts them")
    warm, alone = exposed_seconds(store, base, profile, loads=1)
    _, together = exposed_seconds(store, base, profile, loads=config.max_cold)
    what = f"rank {RANK} on q, k, v keeps a prompt of {PROMPT_TOKENS} tokens waiting for {alone * 1e3:.1f} ms"
    what += f" ({together * 1e3:.1f} ms with {config.max_cold} loads at once) beyond its {warm * 1e3:.0f} ms"
    if together < LEAST_GAIN * warm:
        return WorkersDecision(0, f"little to gain: {what}")
    if not cores_left:
        return WorkersDecision(0, f"{what}, but the engine computes on all cores; threads: N leaves the others")
    return WorkersDecision(min(cores_left, MOST_WORKERS), what)


def exposed_seconds(store: AdapterStore, base: BaseModel, profile: Profile, loads: int) -> tuple[float, float]:
    """Returns a warm prefill's seconds, and what the call waits beyond them while its adapter's layers are pipelined
    over a link that `loads` loads share."""
    costs = pipelined_costs(profile, store.pool.uniform_layout(base, RANK, TARGETS), PROMPT_TOKENS, loads)
    return costs.device * base.num_layers, choose(costs, ("wait", "pipeline")).exposed


def workers_gain(starts: ColdStarts, config: EngineConfig, profile: Profile, count: int) -> bool:
    """Returns whether `count` workers of the speed that the profile says would compute such a call sooner than the
    pipeline."""
    layout = starts.store.pool.uniform_layout(starts.base, RANK, TARGETS)
    pipelined = pipelined_costs(profile, layout, PROMPT_TOKENS, config.max_cold)
    cpu = starts.worker_seconds(profile, layout, PROMPT_TOKENS, count)
    return choose(replace(pipelined, cpu=cpu)).name == "assist"


def known_too_slow(starts: ColdStarts, config: EngineConfig, profile: Profile) -> bool:
    """Returns whether the profile, which was measured with as many workers as were decided on, has them slower than the
    pipeline: then `auto` need not start them to see that. `garnish profile` measures them again."""
    count = starts.decision.count
    if config.cpu_workers is not None or not count or profile.cpu is None or profile.key.workers != count:
        return False
    return not workers_gain(starts, config, profile, count)
