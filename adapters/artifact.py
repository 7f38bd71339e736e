"""The serving artifact: one file per adapter and base, layer-major, checksummed per layer.

Layout: MAGIC, header length (u64 little-endian), the header as JSON, zero padding to ALIGN, then one block per layer in
order. A block holds, per adapted projection in the order of PROJECTIONS, the rows of lora_A.weight [rank, d_in] and then
the rows of lora_B.weight transposed [rank, d_out], each part aligned to ALIGN bytes; all in the file's own dtype.
Scaling is stored in the header, not folded into the weights. A layer without adapted projections has a block of size 0.
"""

from __future__ import annotations

import msgspec

MAGIC = b"GARNISH1"
ALIGN = 64
FORMAT_VERSION = 1


class Pair(msgspec.Struct, frozen=True):
    """One adapted projection of one layer. Offsets are in bytes from the start of the layer's block."""

    projection: int
    rank: int
    scale: float
    a_offset: int
    b_offset: int


class LayerBlock(msgspec.Struct, frozen=True):
    """Where a layer's bytes are (absolute offset in the file) and what they must hash to."""

    offset: int
    size: int
    sha256: str
    pairs: tuple[Pair, ...]


class ArtifactHeader(msgspec.Struct, frozen=True):
    version: int
    digest: str
    base: str
    dtype: str
    """float32, float16 or bfloat16"""
    layers: tuple[LayerBlock, ...]
