"""What the link between host memory and a GPU should carry, and whether it does."""

from __future__ import annotations

TRANSFERS_PER_S = {1: 2.5e9, 2: 5e9, 3: 8e9, 4: 16e9, 5: 32e9, 6: 64e9}
"""Of one lane, by PCIe generation."""
PAYLOAD = {1: 8 / 10, 2: 8 / 10, 3: 128 / 130, 4: 128 / 130, 5: 128 / 130, 6: 236 / 256}
"""Share of the transferred bits that is not the line code or, from generation 6 on, the frame's own bytes."""
LEAST_SHARE = 0.5
"""Of what a link carries, below which a measured one counts as slow: headers and copies take their part of it."""


def link_bandwidth(generation: int, width: int) -> float:
    """Returns the bytes per second that a PCIe link carries in one direction; 0.0 for a generation that is unknown."""
    return float(round(TRANSFERS_PER_S.get(generation, 0.0) * PAYLOAD.get(generation, 0.0) * width / 8))


def slow_link(generation: int, width: int, width_now: int, measured: float | None) -> str:
    """Returns how a link is slower than it should be, or an empty text. `measured`: bytes per second, None where
    nothing was measured.

    The generation in use is no sign: a GPU that is idle lowers it to save power.
    """
    if 0 < width_now < width:
        return f"the PCIe link to the GPU uses {width_now} of {width} lanes"
    whole = link_bandwidth(generation, width)
    if measured is not None and 0 < measured < LEAST_SHARE * whole:
        return (
            f"the link to the GPU was measured at {measured / 1e9:.1f} GB/s; PCIe {generation}.0 x{width} "
            f"carries {whole / 1e9:.1f} GB/s"
        )
    return ""
