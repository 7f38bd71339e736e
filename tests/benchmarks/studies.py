"""Runs a study where torch is loaded already: in the process of the tests."""

from __future__ import annotations

import importlib
import sys
import warnings

import pytest
import torch


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
