"""Layout, bounds and checksums of the serving artifact; its values are compared with PEFT's in test_validate.py."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import safetensors.torch
import torch
from peft_files import ALL, LAYERS, adapter, read_layer, validate

from adapters.artifact import (
    ALIGN,
    MAGIC,
    ArtifactHeader,
    LayerBlock,
    StoredPair,
    artifact_key,
    read_header,
    write_artifact,
)
from adapters.base_model import BaseModel
from adapters.errors import CorruptArtifact, InvalidAdapter, NotFound
from adapters.local_store import LocalStore
from adapters.peft_format import read_peft


@pytest.fixture
def written(tmp_path: Path, base: BaseModel) -> tuple[LocalStore, ArtifactHeader, Path]:
    """An artifact (ranks 3 and 5, layers 0 and 2 of 3, odd sizes) stored under `key`."""
    fields: dict[str, Any] = {"target_modules": ALL, "layers_to_transform": [0, 2], "rank_pattern": {"q_proj": 5}}
    config, weights = adapter(tmp_path / "adapter", r=3, **fields)
    out = tmp_path / "artifact"
    header = write_artifact(validate(read_peft(config, weights), base), base, weights, out)
    store = LocalStore(tmp_path / "store")
    store.put_if_absent("key", out)
    return store, header, out


def rewritten(out: Path, header: ArtifactHeader) -> bytes:
    """The artifact's bytes with another header of whatever length."""
    text = msgspec.json.encode(header)
    prefix = MAGIC + len(text).to_bytes(8, "little") + hashlib.sha256(text).digest()
    return prefix + text + out.read_bytes()[len(prefix) + len(text) :]


def test_the_layout_is_the_documented_one(written: tuple[LocalStore, ArtifactHeader, Path], base: BaseModel) -> None:
    store, header, out = written
    data = out.read_bytes()
    assert data[:8] == b"GARNISH1"
    length = int.from_bytes(data[8:16], "little")
    assert msgspec.json.decode(data[48 : 48 + length], type=ArtifactHeader) == header == read_header(store, "key")
    assert data[16:48] == hashlib.sha256(data[48 : 48 + length]).digest()
    end = 48 + length
    assert [bool(block.pairs) for block in header.layers] == [True, False, True]
    for layer, block in enumerate(header.layers):
        assert block.offset % ALIGN == 0
        assert block.offset >= end
        assert block.offset - end < ALIGN
        content = data[block.offset : block.offset + block.size]
        assert read_layer(store, "key", header, layer) == content
        if block.pairs:
            assert hashlib.sha256(content).hexdigest() == block.sha256
        offsets = [offset for pair in block.pairs for offset in (pair.a_offset, pair.b_offset)]
        assert offsets == sorted(offsets)
        assert all(offset % ALIGN == 0 for offset in offsets)
        assert [pair.projection for pair in block.pairs] == ([*range(7)] if block.pairs else [])
        end = block.offset + block.size
    assert len(data) == end
    assert header.base == base.fingerprint


def test_rows_of_b_are_columns_of_the_file(tmp_path: Path, base: BaseModel) -> None:
    config, weights = adapter(tmp_path / "adapter", r=2, target_modules=["down_proj"])
    tensors = safetensors.torch.load_file(weights)
    layout = validate(read_peft(config, weights), base)
    header = write_artifact(layout, base, weights, tmp_path / "artifact")
    pair = header.layers[1].pairs[0]
    start = header.layers[1].offset + pair.b_offset
    raw = bytearray((tmp_path / "artifact").read_bytes()[start : start + 2 * 32 * 4])
    b = tensors["base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"]
    assert torch.equal(torch.frombuffer(raw, dtype=torch.float32).reshape(2, 32), b.T)


def test_equal_inputs_make_equal_bytes(tmp_path: Path, good: tuple[bytes, Path], base: BaseModel) -> None:
    layout = validate(read_peft(*good), base)
    for name in ("one", "two"):
        write_artifact(layout, base, good[1], tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_a_long_header_takes_two_reads(tmp_path: Path, base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    config, weights = adapter(tmp_path / "adapter", target_modules=ALL)
    header = write_artifact(validate(read_peft(config, weights), base), base, weights, tmp_path / "artifact")
    store = LocalStore(tmp_path / "store")
    store.put_if_absent("key", tmp_path / "artifact")
    for first in (48, 49, 130):
        monkeypatch.setattr("adapters.artifact.FIRST_READ", first)
        assert read_header(store, "key") == header


def test_a_changed_byte_in_any_layer_is_found(written: tuple[LocalStore, ArtifactHeader, Path]) -> None:
    store, header, out = written
    data = out.read_bytes()
    for layer in (0, 2):
        spot = header.layers[layer].offset + header.layers[layer].size - 1
        store.put("key", data[:spot] + bytes([data[spot] ^ 1]) + data[spot + 1 :])
        with pytest.raises(CorruptArtifact, match=f"layer {layer}"):
            read_layer(store, "key", header, layer)
        read_layer(store, "key", header, 2 - layer)
    store.put("key", data[:-1])
    with pytest.raises(CorruptArtifact):
        read_layer(store, "key", header, 2)
    store.delete("key")
    with pytest.raises(NotFound):
        read_layer(store, "key", header, 0)
    with pytest.raises(NotFound):
        read_header(store, "key")


def test_headers_that_can_not_be_true_are_refused(written: tuple[LocalStore, ArtifactHeader, Path]) -> None:
    store, header, out = written
    data = out.read_bytes()
    first = header.layers[0]
    outside = StoredPair(0, 4, 1.0, a_offset=0, b_offset=first.size)
    wrong: list[bytes] = [
        b"",
        b"GARNISH",
        b"GARNISH2" + data[8:],
        MAGIC + (1 << 62).to_bytes(8, "little") + data[16:],
        MAGIC + (3).to_bytes(8, "little") + data[16:],
        rewritten(out, msgspec.structs.replace(header, version=2)),
        rewritten(out, msgspec.structs.replace(header, dtype="int8")),
        rewritten(out, msgspec.structs.replace(header, layers=(first, first, *header.layers[2:]))),
        rewritten(out, msgspec.structs.replace(header, layers=(msgspec.structs.replace(first, offset=0),))),
        rewritten(out, msgspec.structs.replace(header, layers=(msgspec.structs.replace(first, pairs=(outside,)),))),
        rewritten(out, msgspec.structs.replace(header, layers=(LayerBlock(1 << 20, -1, "", ()),))),
    ]
    for content in wrong:
        store.put("key", content)
        with pytest.raises(CorruptArtifact):
            read_header(store, "key")


def test_weights_cut_between_check_and_writing_are_refused(tmp_path: Path, base: BaseModel) -> None:
    config, weights = adapter(tmp_path / "adapter")
    layout = validate(read_peft(config, weights), base)
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(InvalidAdapter, match="shorter"):
        write_artifact(layout, base, weights, tmp_path / "artifact")


def test_the_key_names_format_base_and_digest() -> None:
    assert artifact_key("f" * 64, "d" * 64) == f"artifacts/v1/{'f' * 64}/{'d' * 64}"
    assert LAYERS == 3


def test_any_changed_byte_of_the_header_is_found(written: tuple[LocalStore, ArtifactHeader, Path]) -> None:
    """A flipped scale would otherwise be served as wrong tokens."""
    store, _, out = written
    data = bytearray(out.read_bytes())
    at = data.index(b'"scale":') + len(b'"scale":')
    for position in (at, 16, 47, 8, 50):
        changed = bytearray(data)
        changed[position] ^= 1
        store.put("key", bytes(changed))
        with pytest.raises(CorruptArtifact):
            read_header(store, "key")
