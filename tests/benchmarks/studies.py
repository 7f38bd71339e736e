"""Runs a study where torch is loaded already: in the process of the tests. Several studies may share a service."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from benchmarks.common.http_service import HttpService


def run_study(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> None:
    """As `python -m benchmarks.NAME ARGUMENTS` does, whose threads and warnings are its own affair."""
    threads = torch.get_num_threads()
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("default")
        patch.setattr(sys, "argv", [f"benchmarks.{name}", *arguments])
        try:
            importlib.import_module(f"benchmarks.{name}").main()
        finally:
            torch.set_num_threads(threads)


class KeptService:
    """One service for studies that start equal ones: of the same base, with adapters of the same ranks. The first that
    needs it starts it, and `close` ends it."""

    def __init__(self, root: Path) -> None:
        self._root, self._open = root, ExitStack()
        self._service: HttpService | None = None

    @contextmanager
    def open(
        self, model_dir: Path, adapters: Sequence[Path], root: Path, dtype: str, threads: int
    ) -> Iterator[HttpService]:
        """In the place of HttpService; `root` is the study's, and would not outlive it."""
        if self._service is None:
            service = HttpService(model_dir, list(adapters), self._root / "service", dtype, threads)
            self._service = self._open.enter_context(service)
        yield self._service

    def close(self) -> None:
        self._open.close()
