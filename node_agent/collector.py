"""Python's garbage collector, and the end, of processes that load torch.

Loading it makes hundreds of thousands of objects that stay: looking through them again and again takes a quarter of a
start, and taking them down one by one most of a second of an end.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from typing import NoReturn


def stop_collecting() -> None:
    """Stops Python's garbage collector until `settle`. Called before torch is loaded."""
    gc.disable()


def settle() -> None:
    """Collects from here on; what is there now stays and is not looked through again."""
    gc.freeze()
    gc.enable()


def end(code: int) -> NoReturn:
    """Ends the process at once with what it has written. Nothing else must be left to do, in any thread."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
