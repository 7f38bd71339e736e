"""Replies as pure functions of the engine's events, against decoding and searching the whole text."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.messages import Done, Event, Failed, GenerateRequest, Started, Token
from cluster.text import BaseText
from node_agent.api_reply import Reply
from node_agent.detokenize import TokenText
from node_agent.ipc import Generated
from tests.node_agent.scripted_engine import admitted, finished
from tests.node_agent.served_node import request_of
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
