"""Gives an engine its performance model: the stored one, or one fitted to a sweep."""

from __future__ import annotations

from importlib.metadata import version
from statistics import median

from msgspec.structs import replace

from adapters.base_model import BaseModel
from cluster.model_check import problem_of
from cluster.performance_file import PerformanceProfile
from cluster.performance_fit import (
    MAX_ERROR,
    BadSample,
    DecodeFit,
    DecodeSample,
    PaperForm,
    PrefillFit,
    fit_decode,
    fit_paper_form,
    fit_prefill,
)
from cluster.performance_model import ModelKey, Transfer, rank_terms
from node_agent.coldstart.cold_starts import ColdStartMode
from node_agent.coldstart.costs import pipelined_costs
from node_agent.coldstart.measure import measure_link
from node_agent.coldstart.planner import choose
from node_agent.coldstart.profile import Profile
from node_agent.config import EngineConfig
from node_agent.device import hardware_name
from node_agent.engine.loop import Engine
from node_agent.gpu.devices import expected_link
from node_agent.performance.cases import LONG, RANKS, grid_cases
from node_agent.performance.drift import Drift
from node_agent.performance.links import measure_store
from node_agent.performance.reads import store_transfer
from node_agent.performance.repeats import Progress
from node_agent.performance.stored import stored_performance
from node_agent.performance.sweep import TARGETS, Bench, Sweep, all_cases, bench

LONG_BUDGET = 900.0
"""Maximum seconds that `garnish profile` measures passes; beyond it, fewer repeats are made."""
LINK_ROUNDS = 3
GRID_RANKS = (8, 16, 32, 64)
GRID_CONTEXT = 128
"""Number of context tokens of each row in the measured grid (Toppings, figure 11); fewer if the cache is small."""
PROMPTS = (64, 256, 512)
"""Prompt lengths, in tokens, for which the exposed share is computed (`exposed_share`)."""

ColdCosts = tuple[Transfer, float]
"""Cost of the link to the device, and the exposed share (`exposed_share`), 0 to 1."""


def model_key(engine: Engine, base: BaseModel) -> ModelKey:
    """Returns the conditions that a performance model of this engine depends on."""
    runner = engine.runner
    products = "" if runner.products is None else f", {runner.products.name}"
    name = "" if runner.name == "transformers" else f", runner {runner.name}"
    return ModelKey(
        hardware=f"{hardware_name(runner.device)}{products}{name}",
        base=base.fingerprint,
        dtype=str(runner.dtype).removeprefix("torch."),
        kernel=engine.lora_kernel,
        garnish=version("garnish"),
    )


def use_performance(engine: Engine, config: EngineConfig, base: BaseModel) -> bool:
    """Publishes the matching stored model at the node's start. Returns False if there is none; the node then publishes
    no model."""
    profile = stored_performance(config.profile, model_key(engine, base))
    if profile is None:
        return False
    publish(profile, engine, config, cold_costs(engine, base))
    return True


def publish(profile: PerformanceProfile, engine: Engine, config: EngineConfig, costs: ColdCosts) -> None:
    """Gives the engine the profile's model, which the node's records then publish. `costs`: costs of the link measured
    with cold starts; they replace the profile's."""
    # links are measured with cold starts, and may have changed since the profile was made
    to_device, exposed = costs
    from_store = store_transfer(profile.from_store, config.store_link)
    engine.drift = Drift(replace(profile.model, to_device=to_device, from_store=from_store, exposed_share=exposed))


def measure_performance(
    engine: Engine, config: EngineConfig, base: BaseModel, progress: Progress = lambda *_: None
) -> PerformanceProfile:
    """Measures the node by the thorough sweep, which takes minutes. Raises BadFit or BadSample when the node is too
    small for a sweep, SweepTooSlow, or StoreUnavailable."""
    with bench(engine, base, LONG, progress, LONG_BUDGET) as timed:
        sweep = timed.measure(all_cases(LONG, timed.bounds), LONG.rounds, progress)
        grid = measure_grid(timed, LONG.rounds, progress)
    progress("measuring reads from the store", 0.0)
    profile = profile_of(engine, base, *fit(sweep, engine.lora_kernel), cold_costs(engine, base))
    return replace(
        profile,
        from_store=measure_store(config, base),
        paper=_paper_forms(grid),
        expected_link=expected_link(config.gpu),
        thorough=True,
    )


def measure_grid(timed: Bench, rounds: int, progress: Progress = lambda *_: None) -> list[DecodeSample]:
    """Measures steps on the grid of Toppings' figure 11, limited by the node's rows. Raises SweepTooSlow."""
    return timed.measure(grid_cases(GRID_RANKS, timed.bounds, GRID_CONTEXT), rounds, progress).decode


def _paper_forms(grid: list[DecodeSample]) -> tuple[PaperForm, ...]:
    """Returns the papers' formulas fitted to the measured grid; none if the node has too few rows."""
    try:
        return fit_paper_form(grid, "bgmv"), fit_paper_form(grid, "mbgmv")
    except BadSample:
        return ()


def fit(sweep: Sweep, kernel: str, max_error: float = MAX_ERROR) -> tuple[DecodeFit, PrefillFit]:
    """Fits the decode and the prefill model to a sweep. Takes some tenths of a second. Raises BadFit or BadSample.

    `kernel`: LoRA kernel of the measured decode rows. `max_error`: held-out error allowed for a fit with a poor R^2.
    """
    return fit_decode(sweep.decode, max_error, rank_terms(kernel)), fit_prefill(sweep.prefill, max_error)


def profile_of(
    engine: Engine, base: BaseModel, decode: DecodeFit, prefill: PrefillFit, costs: ColdCosts
) -> PerformanceProfile:
    """Returns the node's performance profile made of these fits and costs. Raises BadSample."""
    to_device, exposed = costs
    profile = PerformanceProfile(
        key=model_key(engine, base),
        decode=decode,
        prefill=prefill,
        to_device=to_device,
        from_store=None,
        exposed_share=exposed,
    )
    problem = problem_of(profile.model)
    if problem:
        raise BadSample(problem)
    return profile


def cold_costs(engine: Engine, base: BaseModel) -> ColdCosts:
    """Returns the cost of the link to the device, and the exposed share of a load (`exposed_share`).

    Without a cold-start profile the link is measured on unused pages: call this before any adapter is loaded.
    """
    profile = engine.cold_start.profile
    link = profile.link if profile is not None else measure_link(engine.store, LINK_ROUNDS)
    share = 1.0 if profile is None else exposed_share(profile, engine.cold_start.mode, engine, base)
    return Transfer(link.latency, link.bandwidth), share


def exposed_share(profile: Profile, mode: ColdStartMode, engine: Engine, base: BaseModel) -> float:
    """Returns the share of a load's duration, 0 to 1, that a cold request waits in addition to a warm prefill.

    The wait is forecast by the planner without CPU workers, for a load that is alone on the link. The result is the
    median over ranks and prompt lengths.
    """
    plans = tuple(plan for plan in mode.plans if plan != "assist")
    shares = []
    for rank in RANKS:
        layout = engine.store.pool.uniform_layout(base, rank, TARGETS)
        for tokens in PROMPTS:
            costs = pipelined_costs(profile, layout, tokens)
            shares.append(choose(costs, plans or ("wait",)).exposed / (costs.latency + float(costs.load.sum())))
    return min(1.0, median(shares))
