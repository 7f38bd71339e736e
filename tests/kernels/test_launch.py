"""The launch table: the committed one loads; what is wrong in another is said with its place."""

from __future__ import annotations

import json

import pytest
import torch

from kernels.launch import (
    DEFAULT,
    OPERATIONS,
    TABLE,
    choose_tuned,
    default_launch,
    launch_for,
    launch_table,
    read_table,
)


def changed(**fields: object) -> bytes:
    """The committed table with fields of its default mbgmv replaced."""
    table = json.loads(TABLE.read_bytes())
    table[DEFAULT]["operations"]["mbgmv"].update(fields)
    return json.dumps(table).encode()


def test_committed_table() -> None:
    assert read_table(TABLE.read_bytes()) == launch_table()
    for operation in OPERATIONS:
        assert launch_for(operation, torch.device("cpu")) == default_launch(operation)


def test_a_gpu_takes_what_was_tuned_on_its_generation() -> None:
    h100 = launch_table()["NVIDIA H100 80GB HBM3"]
    assert h100.operations["mbgmv"] != default_launch("mbgmv")
    assert choose_tuned("NVIDIA H100 80GB HBM3", "9.0") is choose_tuned("NVIDIA H200", "9.0") is h100
    for capability in ("8.0", "10.0"):
        assert choose_tuned("Some GPU", capability).operations["mbgmv"] == default_launch("mbgmv")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"{}", "no 'default'"),
        (b"not JSON", "launch table"),
        (changed(tokens=8), r">= 16 .*`\$\[\.\.\.\]\.operations\[\.\.\.\]\.tokens`"),
        (changed(tokens="16"), "Expected `int`, got `str`"),
        (changed(shrink_width=96), "shrink_width must be a power of two, not 96"),
        (changed(splits=0), ">= 1"),
        (changed(blocks=4), "unknown field `blocks`"),
        (b'{"default": {"tuned": "", "operations": {}}}', "operations must be bgmv, mbgmv, sgmv"),
    ],
)
def test_refuses(text: bytes, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_table(text)
