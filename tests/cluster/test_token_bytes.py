"""The fewest tokens of a text, against the tokenizers themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from cluster.text import BaseText, TextTooLong
from cluster.token_bytes import token_bytes


def byte_level(left_out: bytes) -> Tokenizer:
    """Bytes and a few merges; without merges or letters for `left_out`, as some real vocabularies are."""
    kept = [letter_of(byte) for byte in range(256) if byte not in left_out]
    merges = [("a", "b"), ("ab", "c"), ("\u0120", "\u0120"), ("\u0120\u0120", "\u0120\u0120")]
    vocabulary = [*kept, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(vocabulary)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


def letter_of(byte: int) -> str:
    """The letter of a byte, as the library itself writes it: from a shortest text that has the byte."""
    if byte in (0xC0, 0xC1) or byte >= 0xF5:
        return chr(byte)  # in no UTF-8 text
    if byte < 0x80:
        text = bytes([byte])
    elif byte < 0xC0:
        text = bytes([0xC2, byte])
    else:
        width = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
        text = bytes([byte, {0xE0: 0xA0, 0xF0: 0x90}.get(byte, 0x80), *[0x80] * (width - 2)])
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ((letters, _),) = splitter.pre_tokenize_str(text.decode())
    return letters[text.index(byte)]


TOKENIZERS = [byte_level(b""), byte_level(b"\x00\x01\xc3z")]
TEXTS = st.text(st.one_of(st.sampled_from("abc \x00\x01z\u00e9"), st.characters(codec="utf-8")), max_size=60)


@given(text=TEXTS, which=st.integers(0, 1))
@example(text="\x00" * 100, which=1)
@example(text="<|end|>" * 3 + " " * 40 + "abc", which=0)
def test_never_more_than_there_are(text: str, which: int) -> None:
    found = token_bytes(TOKENIZERS[which])
    assert found is not None
    assert found.fewest_tokens(text) <= len(TOKENIZERS[which].encode(text).ids)


@given(text=TEXTS)
def test_never_more_with_byte_fallback(stories_dir: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(stories_dir / "tokenizer.json"))
    found = token_bytes(tokenizer)
    assert found is not None
    assert found.fewest_tokens(text) <= len(tokenizer.encode(text).ids)


def test_longest_tokens() -> None:
    assert token_bytes(TOKENIZERS[0]).longest == 7  # <|end|>
    assert token_bytes(TOKENIZERS[0]).fewest_tokens("x" * 70) == 10
    assert token_bytes(TOKENIZERS[1]).fewest_tokens("\x00z" * 70) == 0


def test_nothing_is_certain_of_these() -> None:
    stripping, shrinking, dropping, spaces = (byte_level(b"") for _ in range(4))
    stripping.normalizer = normalizers.Strip()
    shrinking.normalizer = normalizers.Sequence([normalizers.Prepend("_"), normalizers.Replace("aa", "a")])
    dropping.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()])
    spaces.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    words = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    no_fallback = Tokenizer(models.BPE({"a": 0, "?": 1}, [], unk_token="?", fuse_unk=True))
    for tokenizer in (stripping, shrinking, dropping, spaces, words, no_fallback):
        assert token_bytes(tokenizer) is None


@pytest.mark.parametrize("characters", [100_000, 700_000])
def test_what_can_not_fit_is_not_tokenised(stories_dir: Path, characters: int) -> None:
    text = BaseText(stories_dir)
    with pytest.raises(TextTooLong):
        text.encode_prompt("x" * characters, limit=characters // 8)
    assert len(text.encode_prompt("x" * 70, limit=10)) > 10  # not certain, so it is counted
