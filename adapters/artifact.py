"""The serving artifact: one file per adapter and base, layer by layer, with a checksum per layer.

Layout: MAGIC, header length (u64 little-endian), SHA-256 of the header, the header as JSON, zero padding to ALIGN, then
one block per layer in order. A block contains the adapted projections in the order of PROJECTIONS. Each has the rows of
lora_A.weight [rank, d_in], then the rows of the transposed lora_B.weight [rank, d_out], both in the artifact's dtype
and padded to ALIGN bytes. Scaling is stored in the header, not folded into the weights. A layer without adapted
projections has a block of size 0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt

from adapters.base_model import BaseModel
from adapters.blobs import blob_key
from adapters.errors import CorruptArtifact, NotFound
from adapters.functions import ITEM_BYTES
from adapters.modules import place_of
from adapters.peft_format import TensorRef
from adapters.store import ObjectStore, RangeReader
from adapters.tensor_values import SERVED_DTYPES, as_float32, read_tensor
from adapters.validate import LoraLayout, LoraPair

MAGIC = b"GARNISH1"
ALIGN = 64
FORMAT_VERSION = 1
PREFIX = len(MAGIC) + 8 + 32
"""Number of bytes before the header."""
MAX_HEADER_BYTES = 64 << 20
READ_BYTES = 8 << 20
FIRST_READ = 64 << 10
"""Size of the first ranged get in bytes, enough for the complete header of most adapters."""


PlacedPair = tuple[int, LoraPair]
"""Index of a projection in PROJECTIONS, and its LoRA matrices."""


class StoredPair(msgspec.Struct, frozen=True):
    """An adapted projection of one layer. Offsets are in bytes from the start of the layer's block."""

    projection: int
    rank: int
    scale: float
    a_offset: int
    b_offset: int


class LayerBlock(msgspec.Struct, frozen=True):
    """Position of a layer's block (absolute offset and size in bytes), and the SHA-256 (hex) of its bytes."""

    offset: int
    size: int
    sha256: str
    pairs: tuple[StoredPair, ...]


class ArtifactHeader(msgspec.Struct, frozen=True):
    """Header of a serving artifact: its identity, and the positions of its layers."""

    version: int
    digest: str
    base: str
    dtype: str
    """Dtype of the weights: float32, float16 or bfloat16."""
    layers: tuple[LayerBlock, ...]


def artifact_key(base_fingerprint: str, digest: str) -> str:
    """Returns the object key of the artifact of an adapter (given by its digest) for a base."""
    return f"artifacts/v{FORMAT_VERSION}/{base_fingerprint}/{digest}"


def write_artifact(layout: LoraLayout, base: BaseModel, weights: Path, out: Path) -> ArtifactHeader:
    """Writes the artifact of a checked adapter to `out`, layer by layer, and returns its header. Uses memory for one
    tensor at a time.

    Raises InvalidAdapter when the weights file was truncated after it was checked.
    """
    header = _planned_header(layout, base)
    blocks = []
    with out.open("wb") as stream:
        for block, pairs in zip(header.layers, _by_layer(layout, base), strict=True):
            sha256 = _write_block(stream, block, pairs, layout.dtype, weights)
            blocks.append(msgspec.structs.replace(block, sha256=sha256))
        header = msgspec.structs.replace(header, layers=tuple(blocks))
        stream.seek(0)
        stream.write(encode_header(header))
    return header


def read_header(store: RangeReader, key: str) -> ArtifactHeader:
    """Returns the checked header, read with one ranged get (two if it is long). Raises NotFound or CorruptArtifact."""
    data = store.get_range(key, 0, FIRST_READ)
    if data[: len(MAGIC)] != MAGIC or len(data) < PREFIX:
        raise CorruptArtifact("not a serving artifact")
    end = PREFIX + int.from_bytes(data[len(MAGIC) : len(MAGIC) + 8], "little")
    if end > MAX_HEADER_BYTES:
        raise CorruptArtifact(f"its header has {end} bytes; at most {MAX_HEADER_BYTES} are read")
    if end > len(data):
        data += store.get_range(key, len(data), end - len(data))
    if hashlib.sha256(data[PREFIX:end]).digest() != data[len(MAGIC) + 8 : PREFIX]:
        raise CorruptArtifact("its header differs from what was written")
    try:
        header = msgspec.json.decode(data[PREFIX:end], type=ArtifactHeader)
    except (msgspec.DecodeError, RecursionError) as error:
        raise CorruptArtifact(f"its header can't be read: {error}") from None
    _check_header(header, end)
    return header


def check_layer(header: ArtifactHeader, layer: int, data: bytes | memoryview) -> None:
    """Raises CorruptArtifact unless `data` is the complete, unchanged block of the layer."""
    block = header.layers[layer]
    if len(data) != block.size or hashlib.sha256(data).hexdigest() != block.sha256:
        raise CorruptArtifact(f"layer {layer} of {header.digest} differs from what was written")


def artifact_problem(store: ObjectStore, base: str, digest: str) -> str:
    """Reads a complete stored artifact, and returns its problem; empty if it is intact."""
    key = artifact_key(base, digest)
    try:
        header = read_header(store, key)
        if (header.base, header.digest) != (base, digest):
            return "is the artifact of another adapter or base"
        for number, block in enumerate(header.layers):
            if block.size and stored_sha256(store, key, block.offset, block.size) != block.sha256:
                return f"differs from what was written (layer {number})"
    except NotFound:
        return "is missing"
    except CorruptArtifact as error:
        return f"differs from what was written ({error})"
    return ""


def stored_sha256(store: ObjectStore, key: str, start: int, size: int) -> str:
    """Returns the SHA-256 (hex) of `size` bytes of an object from offset `start`, fewer if it ends before. Raises
    NotFound."""
    sha256, end = hashlib.sha256(), start + size
    while start < end and (data := store.get_range(key, start, min(READ_BYTES, end - start))):
        sha256.update(data)
        start += len(data)
    return sha256.hexdigest()


def blob_problem(store: ObjectStore, sha256: str) -> str:
    """Reads a complete original file, and returns its problem; "" if it is intact."""
    info = store.head(blob_key(sha256))
    if info is None:
        return "is missing"
    try:
        return "" if stored_sha256(store, info.key, 0, info.size) == sha256 else "differs from what was written"
    except NotFound:
        return "is missing"


def _check_header(header: ArtifactHeader, data_start: int) -> None:
    """Raises CorruptArtifact unless version, dtype and layer bounds are valid. Nothing else needs a check: hashes
    protect the header (ranks, scales, offsets) and the layers."""
    if header.version != FORMAT_VERSION or header.dtype not in ITEM_BYTES:
        raise CorruptArtifact(f"unknown version {header.version} or dtype {header.dtype[:20]}")
    end = data_start
    for block in header.layers:
        parts = [offset for pair in block.pairs for offset in (pair.a_offset, pair.b_offset)]
        if block.offset < end or block.size < 0 or any(not 0 <= part < block.size for part in parts):
            raise CorruptArtifact("its layers overlap or lie outside their blocks")
        end = block.offset + block.size


def _planned_header(layout: LoraLayout, base: BaseModel) -> ArtifactHeader:
    """Returns the header with all offsets. The hashes are placeholders of zeros, as long as the real ones."""
    start = ALIGN
    while True:
        end = start
        blocks = []
        for pairs in _by_layer(layout, base):
            block = _planned_block(pairs, end, ITEM_BYTES[layout.dtype])
            blocks.append(block)
            end += block.size
        header = ArtifactHeader(FORMAT_VERSION, layout.digest, base.fingerprint, layout.dtype, tuple(blocks))
        needed = _aligned(len(encode_header(header)))
        if needed <= start:
            return header
        start = needed  # larger offsets may need more digits, so plan again


def _by_layer(layout: LoraLayout, base: BaseModel) -> Sequence[Sequence[PlacedPair]]:
    """Returns the pairs of each layer of the base, in the order of PROJECTIONS, with their projections' indices."""
    layers: list[list[PlacedPair]] = [[] for _ in range(base.num_layers)]
    for pair in layout.pairs:
        place = place_of(pair.module)
        if place is None:
            raise ValueError(f"{pair.module} is none of the projections that our own engine serves")
        layers[place[0]].append((place[1], pair))
    return [sorted(pairs, key=lambda placed: placed[0]) for pairs in layers]


def _planned_block(pairs: Sequence[PlacedPair], offset: int, item: int) -> LayerBlock:
    placed, size = [], 0
    for projection, pair in pairs:
        d_in, d_out = pair.a.shape[1], pair.b.shape[0]
        b_offset = size + _aligned(pair.rank * d_in * item)
        placed.append(StoredPair(projection, pair.rank, pair.scale, a_offset=size, b_offset=b_offset))
        size = b_offset + _aligned(pair.rank * d_out * item)
    return LayerBlock(offset=offset, size=size, sha256="0" * 64, pairs=tuple(placed))


def encode_header(header: ArtifactHeader) -> bytes:
    """Returns the beginning of the file, up to the padding before the layers."""
    text = msgspec.json.encode(header)
    return MAGIC + len(text).to_bytes(8, "little") + hashlib.sha256(text).digest() + text


def _write_block(stream: BinaryIO, block: LayerBlock, pairs: Sequence[PlacedPair], dtype: str, weights: Path) -> str:
    """Writes one layer's tensors at their offsets, and returns the SHA-256 (hex) of the block."""
    sha256 = hashlib.sha256()
    stream.seek(block.offset)
    for _, pair in pairs:
        for ref, transposed in ((pair.a, False), (pair.b, True)):
            data = _rows(weights, ref, dtype, transposed)
            data += bytes(-len(data) % ALIGN)
            sha256.update(data)
            stream.write(data)
    return sha256.hexdigest()


def _rows(weights: Path, ref: TensorRef, dtype: str, transposed: bool) -> bytes:
    """Returns the elements of a tensor, or of its transpose, row by row as little-endian `dtype`."""
    values: npt.NDArray[Any] = read_tensor(weights, ref).reshape(ref.shape)
    served = SERVED_DTYPES[ref.dtype]
    if served != dtype:  # a file of mixed dtypes: all become float32, which represents each of them exactly
        values = as_float32(values, served)
    return np.ascontiguousarray(values.T if transposed else values).tobytes()


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
