"""The safetensors reader against the safetensors library, and against files broken in one way each."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft_files import safetensors_bytes

from adapters.errors import InvalidAdapter, TooLarge
from adapters.peft_format import (
    MAX_CONFIG_BYTES,
    MAX_HEADER_BYTES,
    read_config,
    read_peft,
    read_tensor_table,
)
from adapters.tensor_values import read_tensor
from adapters.wrong_files import LFS_POINTER

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@given(
    shapes=st.dictionaries(
        st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(1, 5), min_size=1, max_size=3)),
        min_size=1,  # with none, and empty metadata, the library itself writes a header that is no JSON
        max_size=6,
    ),
    metadata=st.none() | st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2),
)
def test_tensors_are_those_that_safetensors_wrote(
    tmp_path_factory: pytest.TempPathFactory, shapes: dict[str, Any], metadata: dict[str, str] | None
) -> None:
    path = tmp_path_factory.mktemp("drawn") / "file.safetensors"
    tensors = {name: torch.randn(shape).to(DTYPES[dtype]) for name, (dtype, shape) in shapes.items()}
    safetensors.torch.save_file(tensors, path, metadata=metadata)
    table = read_tensor_table(path)
    assert {name: (ref.dtype, list(ref.shape)) for name, ref in table.items()} == dict(shapes)
    for name, tensor in tensors.items():
        bits = tensor.flatten().view(torch.int16 if tensor.element_size() == 2 else torch.int32).numpy()
        assert np.array_equal(read_tensor(path, table[name]).view(bits.dtype), bits)


def test_a_header_whose_length_looks_like_a_pickle_is_read(tmp_path: Path) -> None:
    text = json.dumps({"t": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    path = tmp_path / "file.safetensors"
    path.write_bytes(safetensors_bytes(text.ljust(0x0280), bytes(4)))  # starts with 80 02, as pickle protocol 2 does
    assert path.read_bytes()[:2] == b"\x80\x02"
    assert list(read_tensor_table(path)) == ["t"]


def entry(begin: int, end: int, shape: tuple[int, ...] = (2,), dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


BROKEN: dict[str, tuple[Any, int, str]] = {
    # name: (header, bytes of data, what the refusal says)
    "overlap": ({"a": entry(0, 8), "b": entry(4, 12)}, 12, "overlap"),
    "same bytes twice": ({"a": entry(0, 8), "b": entry(0, 8)}, 8, "overlap"),
    "gap": ({"a": entry(0, 8), "b": entry(12, 20)}, 20, "unused bytes"),
    "bytes left over": ({"a": entry(0, 8)}, 12, "bytes follow"),
    "outside": ({"a": entry(0, 8)}, 4, "outside the file"),
    "backwards": ({"a": entry(8, 0)}, 8, "outside the file"),
    "negative": ({"a": entry(-8, 0)}, 8, "malformed data_offsets"),
    "fractions": ({"a": {**entry(0, 8), "data_offsets": [0, 8.0]}}, 8, "malformed data_offsets"),
    "true as a number": ({"a": {**entry(0, 4), "shape": [True]}}, 4, "malformed shape"),
    "wrong size": ({"a": entry(0, 8, (3,))}, 8, "does not fit its shape"),
    "overflowing shape": ({"a": entry(0, 8, (1 << 40, 1 << 40))}, 8, "does not fit its shape"),
    "many dimensions": ({"a": entry(0, 4, (1,) * 9)}, 4, "malformed shape"),
    "unknown dtype": ({"a": entry(0, 8, dtype="F33")}, 8, "unknown dtype"),
    "extra field": ({"a": {**entry(0, 8), "more": 1}}, 8, "malformed header entry"),
    "missing field": ({"a": {"dtype": "F32"}}, 8, "malformed header entry"),
    "no object": ([], 0, "not a safetensors file"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_tables_are_refused(tmp_path: Path, case: str) -> None:
    header, size, reason = BROKEN[case]
    path = tmp_path / "file.safetensors"
    path.write_bytes(safetensors_bytes(json.dumps(header).encode(), bytes(size)))
    with pytest.raises(InvalidAdapter) as raised:
        read_tensor_table(path)
    assert any(reason in problem.problem for problem in raised.value.problems)
    if case not in ("extra field", "many dimensions"):  # the library is laxer there
        with pytest.raises((safetensors.SafetensorError, OverflowError)):
            safetensors.torch.load(path.read_bytes())


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not a safetensors file"),
        (b"short", "not a safetensors file"),
        (b"<html>not found</html>", "not a safetensors file"),
        (safetensors_bytes(b"{}", length=2 << 30), "header is too long"),
        (safetensors_bytes(b"{}", length=(1 << 64) - 1), "header is too long"),
        (safetensors_bytes(b"{}", length=MAX_HEADER_BYTES), "does not end inside the file"),
        (safetensors_bytes(b"{}", length=3), "does not end inside the file"),
        (safetensors_bytes(b'{"a": NaN}'), "NaN is not"),
        (safetensors_bytes(b'{"a": ' + b"[" * 200_000), "nested too deeply"),
        (safetensors_bytes(b'{"\\ud800": 1}'), "surrogate"),
        (safetensors_bytes(b'{"a": 1, "a": 2}'), "occurs twice"),
        (safetensors_bytes(b"{\xff}"), "not UTF-8"),
        (b"GGUF\x03\x00\x00\x00\x00\x00", "GGUF"),
        (LFS_POINTER + b"\noid sha256:00\nsize 4096\n", "a Git LFS pointer, not the file itself: run `git lfs pull`"),
    ],
)
def test_files_that_are_no_safetensors_are_refused(tmp_path: Path, data: bytes, reason: str) -> None:
    path = tmp_path / "file.safetensors"
    path.write_bytes(data)
    with pytest.raises(InvalidAdapter, match=reason):
        read_tensor_table(path)


def test_a_config_that_is_a_pointer_of_git_lfs_is_told_as_that() -> None:
    with pytest.raises(InvalidAdapter, match="a Git LFS pointer, not the file itself: run `git lfs pull`"):
        read_config(LFS_POINTER + b"\noid sha256:00\nsize 4096\n")


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (self.path, "w"))


@pytest.mark.parametrize("writer", ["torch zip", "torch legacy", 2, 3, 4, 5])
def test_a_pickle_is_refused_by_name_and_never_loaded(tmp_path: Path, writer: str | int) -> None:
    path, trap = tmp_path / "adapter_model.safetensors", tmp_path / "trap"
    bomb = Bomb(str(trap))
    if isinstance(writer, int):
        path.write_bytes(pickle.dumps(bomb, protocol=writer))
    else:
        torch.save(bomb, path, _use_new_zipfile_serialization=writer == "torch zip")
    with pytest.raises(InvalidAdapter, match="pickle"):
        read_peft(b"{}", path)
    assert not trap.exists()


def test_problems_of_both_files_are_listed_together(tmp_path: Path) -> None:
    path = tmp_path / "adapter_model.safetensors"
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(InvalidAdapter) as raised:
        read_peft(b'{"r": NaN}', path)
    assert [problem.tensor for problem in raised.value.problems] == ["adapter_config.json", "adapter_model.safetensors"]


def test_configs_are_objects_of_bounded_size() -> None:
    with pytest.raises(InvalidAdapter, match="not a JSON object"):
        read_config(b"[]")
    with pytest.raises(TooLarge):
        read_config(b" " * (MAX_CONFIG_BYTES + 1))


def test_a_file_cut_after_its_header_was_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    safetensors.torch.save_file({"t": torch.ones(1000)}, path)
    ref = read_tensor_table(path)["t"]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InvalidAdapter, match="shorter"):
        read_tensor(path, ref)
