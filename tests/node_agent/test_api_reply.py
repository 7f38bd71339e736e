"""Replies as pure functions of the engine's events, against decoding and searching the whole text."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.messages import Done, Event, Failed, GenerateRequest, PromptLogprobs, Sampling, Started, Token
from cluster.text import BaseText
from node_agent.api.detokenize import IncrementalDetokenizer, TokenText
from node_agent.api.reply import Reply
from node_agent.ipc import Generated, PromptScored, Top
from tests.node_agent.scripted_engine import admitted, finished
from tests.node_agent.served_node import request_of
from tests.node_agent.test_detokenize import byte_level_directory
from tests.node_agent.test_stops import whole_text_answer


@pytest.fixture(scope="module")
def text(stories_dir: Path) -> BaseText:
    return BaseText(stories_dir)


def events_of(text: BaseText, request: GenerateRequest, ids: list[int], reason: str = "length") -> list[Event]:
    reply = Reply(request, "n1", TokenText(text), received=0.0)
    said = [admitted("r1"), *(Generated("r1", token_id) for token_id in ids), finished("r1", reason)]
    events = [event for event in map(reply.translate, said) if event is not None]
    assert reply.ended
    return events


@given(data=st.data())
def test_drawn_tokens_and_stop_strings(text: BaseText, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, 511), max_size=30))
    whole = text.tokenizer.decode(ids, skip_special_tokens=True)
    inside = st.builds(
        lambda start, size: whole[start : start + size] or "x", st.integers(0, len(whole)), st.integers(1, 5)
    )
    stops = data.draw(st.lists(st.one_of(inside, st.text("aet h", min_size=1, max_size=3)), max_size=3))
    expected, stopped = whole_text_answer(whole, stops)

    started, *tokens, done = events_of(text, request_of(stop=stops), ids)

    assert isinstance(started, Started)
    assert isinstance(done, Done)
    assert all(isinstance(event, Token) for event in tokens)
    assert "".join(event.text for event in [*tokens, done]) == expected
    assert done.finish_reason == ("stop" if stopped else "length")
    assert [event.index for event in tokens] == list(range(done.completion_tokens))
    assert [token_id for event in tokens for token_id in event.token_ids] == ids[: done.completion_tokens]
    if not stopped:
        assert done.completion_tokens == len(ids)


def test_after_the_end_nothing_is_retryable_that_was_begun(text: BaseText) -> None:
    reply = Reply(request_of(), "n1", TokenText(text), received=0.0)
    assert reply.fail("node_failed", "gone").retryable
    reply.translate(Generated("r1", 403))
    assert reply.fail("node_failed", "gone") == Failed("node_failed", "gone", retryable=False)
    assert not reply.fail("validation_failed", "bad").retryable


@given(data=st.data())
def test_special_tokens_are_shown_where_they_are_wanted(text: BaseText, data: st.DataObject) -> None:
    """Against decoding prompt and output as a whole."""
    words = st.lists(st.one_of(st.integers(0, 511), st.sampled_from([1, 2])), min_size=1, max_size=12)
    prompt, ids = [1, 403, *data.draw(words)], data.draw(words)
    decode = text.tokenizer.decode
    whole, before = (decode(some, skip_special_tokens=False) for some in (prompt + ids, prompt))
    asked = request_of(token_ids=prompt, sampling=Sampling(skip_special_tokens=False), ignore_eos=True)
    _, *tokens, done = events_of(text, asked, ids)
    if whole.startswith(before) and not before.endswith("\ufffd"):
        assert "".join(event.text for event in [*tokens, done]) == whole[len(before) :]  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> BaseText:
    return BaseText(byte_level_directory(tmp_path_factory.mktemp("byte_level")))


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_that_is_a_special_token_stops(byte_level: BaseText, include: bool) -> None:
    """Also where special tokens are not part of the text, and with text before it."""
    name, before = "<|im_start|>", byte_level.encode_plain("Once upon")
    ids = [*before, byte_level.tokenizer.token_to_id(name), *before]
    for stop in (name, f"n{name}"):
        asked = request_of(stop=[stop], sampling=Sampling(include_stop=include))
        _, *tokens, done = events_of(byte_level, asked, ids)
        assert isinstance(done, Done)
        assert (done.finish_reason, done.stop_reason, done.completion_tokens) == ("stop", stop, len(before) + 1)
        expected = "Once upon".removesuffix(stop.removesuffix(name)) + (stop if include else "")
        assert "".join(event.text for event in [*tokens, done]) == expected  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["text", "byte_level"])
@given(data=st.data())
def test_offsets_and_bytes_are_those_of_the_text(
    kind: str, request: pytest.FixtureRequest, data: st.DataObject
) -> None:
    """Of tokens that are words, bytes and parts of characters, with text that a stop string holds back."""
    text = request.getfixturevalue(kind)
    written = data.draw(st.text("ab \u00e9\u20ac\U0001f600", min_size=1, max_size=12))
    ids = text.encode_plain(written) + data.draw(
        st.lists(st.integers(3, text.tokenizer.get_vocab_size() - 1), max_size=5)
    )
    asked = request_of(stop=["ab\u20ac\u20ac\u20ac\u20ac"], sampling=Sampling(logprobs=0), ignore_eos=True)
    reply = Reply(asked, "n1", TokenText(text), received=0.0)
    tokens = [reply.translate(Generated("r1", token_id, Top(-0.5, [(token_id, -0.5)]))) for token_id in ids]
    whole, entries = "", [entry for token in tokens if isinstance(token, Token) for entry in token.logprobs]
    detokenizer = IncrementalDetokenizer(TokenText(text), asked.token_ids)
    for token_id, entry in zip(ids, entries, strict=True):
        assert entry.offset == len(whole)
        whole += detokenizer.add(token_id)
    cut, top = data.draw(st.integers(0, len(ids))), Top(-0.5, [])
    other = Reply(asked, "n2", TokenText(text), received=0.0)
    other.resume(ids[:cut])
    after = [other.translate(Generated("r1", token_id, top)) for token_id in ids[cut:]]
    resumed = [entry.offset for token in after if isinstance(token, Token) for entry in token.logprobs]
    assert resumed == [entry.offset for entry in entries[cut:]], "another node goes on with the same offsets"
    parts = [entry.part or entry.token.encode() for entry in entries]
    assert [top.part for entry in entries for top in entry.top] == [entry.part for entry in entries]
    assert all(entry.part for entry in entries if "\ufffd" in entry.token)
    size = len(text.encode_plain(written))
    assert b"".join(parts[:size]).decode().lstrip() == written.lstrip()


@given(ids=st.lists(st.integers(3, 511), min_size=1, max_size=10), include=st.booleans(), stop=st.booleans())
def test_the_token_that_ends_a_text(text: BaseText, ids: list[int], include: bool, stop: bool) -> None:
    """Not part of the text, unless asked for; `stop_reason` names it, but for the end of text."""
    end = ids[-1] if stop else 2
    output = ids if stop else [*ids, 2]
    output = output[: output.index(end) + 1]
    way = Sampling(stop_token_ids=[end] if stop else [], include_stop=include, skip_special_tokens=False)
    _, *tokens, done = events_of(text, request_of(sampling=way, token_ids=[1, 403]), output, "stop")
    assert isinstance(done, Done)
    said = "".join(event.text for event in [*tokens, done])  # type: ignore[union-attr]
    shown = output if include else output[:-1]
    whole = text.tokenizer.decode([1, 403, *shown], skip_special_tokens=False)
    assert said == whole[len(text.tokenizer.decode([1, 403], skip_special_tokens=False)) :]
    assert (done.finish_reason, done.stop_reason) == ("stop", end if stop else None)
    assert done.completion_tokens == len(output)


def test_prompt_scores_are_told_with_their_tokens(text: BaseText) -> None:
    reply = Reply(request_of(token_ids=[1, 403, 407, 261]), "n1", TokenText(text), received=0.0)
    told = reply.translate(PromptScored("r1", 2, [Top(-0.5, [(261, -0.1)], 4), Top(-1.5, [], 1)]))
    assert isinstance(told, PromptLogprobs)
    assert [(entry.token_id, entry.logprob, entry.rank) for entry in told.logprobs] == [(407, -0.5, 4), (261, -1.5, 1)]
    assert [top.token_id for top in told.logprobs[0].top] == [261]
