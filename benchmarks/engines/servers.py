"""The three servers that the study calls: a node with each engine behind the gateway, and vLLM's own server."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.common.http_service import HttpService
from benchmarks.engines.vllm_server import VllmServer
from node_agent.config import EngineConfig, VllmConfig

GARNISH, VLLM, ALONE = "garnish", "vllm", "vllm_server"
TITLES = {GARNISH: "`engine: garnish`", VLLM: "`engine: vllm`", ALONE: "vLLM's own server"}


class Server(Protocol):
    """A server of OpenAI's /v1/completions that has started, with its functions a0, a1, ..."""

    base: str
    url: str
    key: str

    @property
    def pid(self) -> int: ...


@dataclass(frozen=True)
class Setup:
    """Settings that all three servers have. `kv_memory`, `adapter_memory`: bytes on the device."""

    model: Path
    python: Path
    """interpreter of the environment that has vLLM"""
    device: str
    dtype: str
    max_rows: int
    kv_memory: int
    adapter_memory: int
    arguments: Mapping[str, Any]
    """further engine arguments of vLLM"""

    def make(
        self, name: str, adapters: list[Path], root: Path, environment: Mapping[str, str]
    ) -> AbstractContextManager[Server]:
        """Returns a server that starts with its context."""
        if name == ALONE:
            return VllmServer(self.engine_config(), adapters, root, environment)
        return HttpService(
            self.model,
            adapters,
            root,
            self.dtype,
            0,
            self._node(name),
            device=self.device,
            environment=environment,
        )

    def engine_config(self) -> EngineConfig:
        """Returns the settings of a node that drives vLLM, as far as they decide vLLM's arguments."""
        return EngineConfig(
            model_dir=str(self.model),
            base_id=self.model.name,
            registry="",
            engine="vllm",
            vllm=VllmConfig(str(self.python), dict(self.arguments)),
            dtype=self.dtype,
            max_rows=self.max_rows,
            kv_memory=self.kv_memory,
            prefix_cache="off",
        )

    def _node(self, name: str) -> str:
        stated = f", engine: {name}, max_rows: {self.max_rows}, kv_memory: {self.kv_memory}"
        if name == GARNISH:
            return f"{stated}, adapter_memory: {self.adapter_memory}"
        arguments = "".join(f", {key}: {value}" for key, value in self.arguments.items())
        return f"{stated}, vllm: {{python: {self.python}{arguments}}}"
