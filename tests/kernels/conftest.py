from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def interpreted_quickly(quick_interpreter: None) -> None:
    """Most tests of this folder run kernels."""
