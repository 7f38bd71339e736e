"""stories260K after conversion: what plain transformers writes, and a tokenizer equal to llama2.c's."""

from __future__ import annotations

import struct
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

EXAMPLES = Path(__file__).parents[2] / "examples" / "models"
SOURCE = EXAMPLES / "stories260K"


class Llama2cTokenizer:
    """llama2.c's `encode` and `decode`, written after run.c: greedy merges by score over characters or bytes."""

    def __init__(self, file: Path) -> None:
        data = file.read_bytes()
        offset, self.tokens, self.scores = 4, [], []
        while offset < len(data):
            score, length = struct.unpack_from("<fi", data, offset)
            self.tokens.append(data[offset + 8 : offset + 8 + length])
            self.scores.append(score)
            offset += 8 + length
        self.ids = {token: index for index, token in enumerate(self.tokens)}

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for character in (" " + text) if text else "":
            piece = character.encode()
            ids += [self.ids[piece]] if piece in self.ids else [byte + 3 for byte in piece]
        while True:
            best, at = None, 0
            for index in range(len(ids) - 1):
                merged = self.ids.get(self.tokens[ids[index]] + self.tokens[ids[index + 1]])
                if merged is not None and (best is None or self.scores[merged] > self.scores[best]):
                    best, at = merged, index
            if best is None:
                return [1, *ids]
            ids[at : at + 2] = [best]

    def decode(self, ids: list[int]) -> bytes:
        out = b""
        for previous, token in zip([0, *ids], ids, strict=False):
            if token in (1, 2):
                continue
            piece = self.tokens[token]
            if previous == 1 and piece.startswith(b" "):
                piece = piece[1:]
            out += bytes([token - 3]) if 3 <= token < 259 else piece
        return out


@lru_cache
def reference() -> Llama2cTokenizer:
    return Llama2cTokenizer(SOURCE / "tok512.bin")


@pytest.fixture(scope="session")
def tokenizer(stories_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(stories_dir / "tokenizer.json"))


def test_greedy_text_is_that_of_llama2c(stories_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(stories_dir)
    auto = AutoTokenizer.from_pretrained(stories_dir)
    out = model.generate(torch.tensor([[auto.bos_token_id]]), max_new_tokens=200, do_sample=False)
    expected = (SOURCE / "stories260K.greedy200.txt").read_bytes()
    assert auto.decode(out[0], skip_special_tokens=True).encode() == expected


SAMPLES = [
    "",
    " ",
    "Once upon a time, there was a little girl named Lily.",
    "Tim  said:\n\t“I don’t know…” — café, naïve ñandú, €5 & 100%",
    "日本語 and 😀 and \x00 NUL",
    "<0x41> <unk",
    "aaaaaaa eeeee ooooooo llllll mmmmm",
]


@pytest.mark.parametrize("text", SAMPLES)
def test_samples_encode_and_decode_as_llama2c(tokenizer: Tokenizer, text: str) -> None:
    check(tokenizer, text)


STORY_WORDS = (SOURCE / "stories260K.greedy200.txt").read_text().split()
SPECIAL = ("<unk>", "<s>", "</s>")
DRAWN_TEXT = st.one_of(
    st.text(max_size=80),
    st.text(alphabet="abehilmnorstw T.'\"\n", max_size=120),
    st.lists(st.sampled_from(STORY_WORDS), max_size=30).map(" ".join),
).filter(lambda text: not any(token in text for token in SPECIAL))


@given(text=DRAWN_TEXT)
def test_drawn_text_encodes_and_decodes_as_llama2c(tokenizer: Tokenizer, text: str) -> None:
    check(tokenizer, text)


def check(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    assert ids == reference().encode(text)
    assert tokenizer.decode(ids) == reference().decode(ids).decode() == text


SPACE_BYTE = 3 + ord(" ")
"""The byte fallback's token of a space."""


@given(tail=st.lists(st.integers(3, 511), max_size=40))
def test_drawn_ids_decode_as_llama2c(tokenizer: Tokenizer, tail: list[int]) -> None:
    if tail[:1] == [SPACE_BYTE]:
        return  # no encoder writes it; tokenizers strip it as a leading space, llama2.c only a piece that begins so
    expected = reference().decode([1, *tail])
    try:
        text = expected.decode()
    except UnicodeDecodeError:
        return  # a broken UTF-8 sequence has no text in common: C prints raw bytes, Python must replace them
    assert tokenizer.decode([1, *tail]) == text


def test_transformers_reads_the_same_tokenizer(stories_dir: Path, tokenizer: Tokenizer) -> None:
    auto = AutoTokenizer.from_pretrained(stories_dir)
    for text in SAMPLES:
        assert auto(text).input_ids == tokenizer.encode(text).ids
    assert (auto.bos_token_id, auto.eos_token_id) == (1, 2)


def test_a_second_run_changes_nothing_and_an_old_directory_is_replaced(tmp_path: Path) -> None:
    target = tmp_path / "stories"

    def convert() -> str:
        command = [sys.executable, str(EXAMPLES / "convert_stories.py"), str(target)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    assert "wrote" in convert()
    before = {file.name: (file.stat().st_mtime_ns, file.read_bytes()) for file in target.iterdir()}
    assert "up to date" in convert()
    assert {file.name: (file.stat().st_mtime_ns, file.read_bytes()) for file in target.iterdir()} == before
    (target / "conversion.json").write_text("{}")
    (target / "left-over").write_text("from another version")
    assert "wrote" in convert()
    assert {file.name: file.read_bytes() for file in target.iterdir()} == {k: v for k, (_, v) in before.items()}
    assert [entry.name for entry in tmp_path.iterdir()] == ["stories"]
