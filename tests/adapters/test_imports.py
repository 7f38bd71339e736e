from __future__ import annotations

import subprocess
import sys


def test_the_registry_needs_no_torch() -> None:
    """A gateway host has none; neither does a client that only checks adapters."""
    code = "import sys, adapters.registry, adapters.tenants; print([m for m in sys.modules if 'torch' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
