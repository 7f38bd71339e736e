"""Incremental decoding against the tokenizer's decoding of the whole, for byte-fallback and byte-level tokenizers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from cluster.text import BaseText
from node_agent.api.detokenize import KEEP, WINDOW, IncrementalDetokenizer, TokenText

ROOT = Path(__file__).parents[2]
SAMPLE = "Once upon a time, there was a café; naïve 日本語 text and \U0001f9d1‍\U0001f680 rockets.\n"


def byte_level_directory(directory: Path) -> Path:
    """A GPT-2-like tokenizer: every byte has a token, few merges, so that characters are split over tokens."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([SAMPLE] * 4, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|im_start|>"}))
    (directory / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    return directory


@pytest.fixture(scope="module", params=["byte_fallback", "byte_level"])
def text(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, stories_dir: Path) -> BaseText:
    if request.param == "byte_fallback":
        return BaseText(stories_dir)
    return BaseText(byte_level_directory(tmp_path_factory.mktemp("byte_level")))


def pieces_of(text: BaseText, ids: list[int], prompt: list[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(TokenText(text), prompt)
    return [*(detokenizer.add(token_id) for token_id in ids), detokenizer.flush()]


def plain_ids(text: BaseText, written: str) -> list[int]:
    return text.tokenizer.encode(written, add_special_tokens=False).ids


@given(data=st.data())
def test_any_tokens_decode_as_the_whole(text: BaseText, data: st.DataObject) -> None:
    """Drawn ids are mostly invalid UTF-8, with special tokens in between and ids that have no token."""
    size = text.tokenizer.get_vocab_size()
    ids = data.draw(st.lists(st.integers(0, size + 3), max_size=60))
    assert "".join(pieces_of(text, ids, [text.bos_id])) == text.tokenizer.decode(ids, skip_special_tokens=True)


@given(data=st.data())
def test_byte_soup_decodes_as_the_whole(text: BaseText, data: st.DataObject) -> None:
    """Sequences over the tokens of lead, continuation and impossible bytes, longer than the window."""
    byte_ids = plain_ids(text, "\u00e9\u20ac\U0001f600\ufffda ")
    ids = data.draw(st.lists(st.sampled_from(byte_ids), min_size=WINDOW, max_size=5 * WINDOW))
    assert "".join(pieces_of(text, ids, [text.bos_id])) == text.tokenizer.decode(ids, skip_special_tokens=True)


@given(data=st.data())
def test_drawn_text_comes_back_without_half_characters(text: BaseText, data: st.DataObject) -> None:
    alphabet = st.one_of(
        st.sampled_from("ab .\n\u00e9\u20ac\u4e2d\U0001f600\U0001f9d1\u200d\U0001f680"),
        st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"),
    )
    written = data.draw(st.text(alphabet, max_size=40))
    ids = plain_ids(text, written)
    whole = text.tokenizer.decode(ids, skip_special_tokens=True)
    pieces = pieces_of(text, ids, [text.bos_id])
    assert "".join(pieces) == whole
    if (
        "\ufffd" not in whole
    ):  # in a byte run, a drawn text can't be half a character; only a special token's name could
        assert not any("\ufffd" in piece for piece in pieces)


@given(data=st.data())
def test_text_continues_the_prompt(text: BaseText, data: st.DataObject) -> None:
    prompt = plain_ids(text, data.draw(st.sampled_from(["Once upon", "a \u4e2d", "the \U0001f600", "x\n"])))
    written = data.draw(st.text(st.sampled_from("ab .\n\u00e9\u4e2d"), max_size=20))
    ids = plain_ids(text, written)
    before, whole = text.tokenizer.decode(prompt), text.tokenizer.decode(prompt + ids)
    assert before + "".join(pieces_of(text, ids, prompt)) == whole


def test_the_first_word_keeps_its_space_behind_a_prompt(stories_dir: Path) -> None:
    text = BaseText(stories_dir)
    ids = plain_ids(text, "there was")
    assert "".join(pieces_of(text, ids, [text.bos_id])) == "there was"
    assert "".join(pieces_of(text, ids, [text.bos_id, *plain_ids(text, "time")])) == " there was"


def test_every_piece_comes_as_soon_as_its_word(stories_dir: Path) -> None:
    text = BaseText(stories_dir)
    ids = plain_ids(text, "Once upon a time, there was")
    pieces = pieces_of(text, ids, [text.bos_id])
    assert pieces[-1] == "", "nothing is left for the end"
    assert all(pieces[:-1]), "every token's text comes with the token"


def test_an_unfinished_character_shows_at_the_end_only(text: BaseText) -> None:
    ids = plain_ids(text, "\U0001f600")[:-1]
    *pieces, last = pieces_of(text, ids, [text.bos_id])
    assert "\ufffd" not in "".join(pieces)
    assert "\ufffd" in last


def test_a_long_text_is_decoded_in_a_bounded_window(text: BaseText, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = plain_ids(text, SAMPLE * 20)
    tokens = TokenText(text)
    sizes: list[int] = []
    decode = tokens.decode
    monkeypatch.setattr(tokens, "decode", lambda window: sizes.append(len(window)) or decode(window))
    detokenizer = IncrementalDetokenizer(tokens, [text.bos_id])
    pieces = [detokenizer.add(token_id) for token_id in ids]
    assert "".join(pieces) + detokenizer.flush() == text.tokenizer.decode(ids)
    longest_run = 24  # the sample's longest run of bytes without a token of their own
    assert max(sizes) <= WINDOW + longest_run
    assert KEEP < WINDOW


def test_one_token_shows_its_space_and_its_name(stories_dir: Path) -> None:
    text = BaseText(stories_dir)
    tokens = TokenText(text)
    (first, *_) = plain_ids(text, "the")
    assert tokens.one(first).startswith(" ")
    assert tokens.one(text.bos_id) == text.tokenizer.id_to_token(text.bos_id)


def test_added_tokens_may_follow_each_other_without_spaces(tmp_path: Path) -> None:
    """A tokenizer without a decoder writes a space before each token."""
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "one": 1, "two": 2, "[?]": 3}, unk_token="[?]"))
    tokenizer.add_special_tokens(["<s>", "<a>", "<b>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    tokens = TokenText(BaseText(tmp_path)).with_special
    ids = [1, 4, 5, 4, 2, 5, 4]
    texts = {}
    for spaces in (True, False):
        detokenizer = IncrementalDetokenizer(tokens, [1], spaces=spaces)
        texts[spaces] = "".join([*map(detokenizer.add, ids), detokenizer.flush()])
    assert texts == {True: " one <a> <b> <a> two <b> <a>", False: " one <a><b><a> two <b><a>"}
