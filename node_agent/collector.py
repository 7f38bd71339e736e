"""Garbage collection and exit of processes that load torch.

Loading torch creates hundreds of thousands of permanent objects. Collecting among them takes a quarter of the start
time; freeing them one by one takes most of a second at exit.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from typing import NoReturn


def stop_collecting() -> None:
    """Disables the garbage collector until `settle`. Called before torch is loaded."""
    gc.disable()


def settle() -> None:
    """Enables the garbage collector again, and freezes all present objects, so that later collections skip them."""
    gc.freeze()
    gc.enable()


def end(code: int) -> NoReturn:
    """Flushes logs and output streams, and exits the process at once. No thread may have unfinished work."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
