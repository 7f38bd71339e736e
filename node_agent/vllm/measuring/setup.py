"""Gives a node with vLLM its performance model: the stored one, or one fitted to a measurement."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from adapters.base_model import BaseModel
from cluster.model_check import problem_of
from cluster.performance_file import PerformanceProfile
from cluster.performance_fit import BadSample, DecodeFit, PrefillFit, TransferSample
from cluster.performance_model import ModelKey
from node_agent.config import EngineConfig
from node_agent.cores import cpu_name, usable_cores
from node_agent.performance.drift import Drift
from node_agent.performance.reads import store_transfer
from node_agent.performance.stored import stored_performance
from node_agent.vllm.engine import VllmEngine
from node_agent.vllm.measuring.dummies import DummyFolders
from node_agent.vllm.measuring.samples import fit_loads

KERNEL = "vllm"
NAMES = ("model", "served_model_name")
"""Arguments that do not matter for times: the model's fingerprint is in the key itself."""
VARIABLES = ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_ATTENTION_BACKEND")
"""Environment variables by which vLLM's speed differs."""
DIGITS = 8


@dataclass(frozen=True)
class Conditions:
    """Conditions that a measurement of this node depends on."""

    base: BaseModel
    dtype: str
    """data type of the weights and of adapters on the device"""
    device: str
    """name of a GPU; empty: vLLM computes on the CPU"""
    vllm: str
    """version of vLLM"""
    arguments: Mapping[str, Any]
    """vLLM's engine arguments"""
    garnish: str
    """version of Garnish"""

    @property
    def key(self) -> ModelKey:
        stated = {name: value for name, value in self.arguments.items() if name not in NAMES}
        stated |= {name: os.environ[name] for name in VARIABLES if name in os.environ}
        digest = hashlib.sha256(json.dumps(stated, sort_keys=True, default=str).encode()).hexdigest()[:DIGITS]
        device = self.device or f"{cpu_name()}, {usable_cores()} cores"
        return ModelKey(
            hardware=f"{device}, vLLM {self.vllm}, arguments {digest}",
            base=self.base.fingerprint,
            dtype=self.dtype,
            kernel=KERNEL,
            garnish=self.garnish,
        )


def use_performance(engine: VllmEngine, config: EngineConfig, conditions: Conditions) -> bool:
    """Publishes the matching stored model at the node's start. Returns False if there is none."""
    profile = stored_performance(config.profile, conditions.key)
    if profile is None:
        return False
    publish(profile, engine, config)
    return True


def publish(profile: PerformanceProfile, engine: VllmEngine, config: EngineConfig) -> None:
    """Gives the engine the profile's model, which the node's records then publish."""
    from_store = store_transfer(profile.from_store, config.store_link)
    engine.drift = Drift(replace(profile.model, from_store=from_store))


def profile_of(
    conditions: Conditions, decode: DecodeFit, prefill: PrefillFit, loads: list[TransferSample]
) -> PerformanceProfile:
    """Returns the profile made of these fits and loads. A cold request waits for its whole adapter. Raises
    BadSample."""
    profile = PerformanceProfile(
        key=conditions.key,
        decode=decode,
        prefill=prefill,
        to_device=fit_loads(loads),
        from_store=None,
        exposed_share=1.0,
    )
    problem = problem_of(profile.model)
    if problem:
        raise BadSample(problem)
    return profile


def dummy_folders(engine: VllmEngine, conditions: Conditions) -> DummyFolders:
    """Returns the folders of dummy adapters, in the node's own folder of adapters."""
    return DummyFolders(engine.store.hosts.root, conditions.base, conditions.dtype)
