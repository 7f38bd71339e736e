"""Stop strings against a search of the whole text."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from node_agent.api.stops import StopMatcher

LETTERS = "ab\u20ac"
"""Few letters, so that drawn stop strings overlap themselves, each other and the text."""
stop_strings = st.lists(st.text(LETTERS, min_size=1, max_size=5), max_size=4)


def whole_text_answer(text: str, stops: list[str]) -> tuple[str, bool]:
    """Tries every end from the left: the first at which some stop string ends, and of those the longest."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            return text[: end - max(map(len, matches))], True
    return text, False


def longest_beginning(text: str, stops: list[str]) -> int:
    """Length of the longest end of `text` that is a proper beginning of a stop string."""
    return max(
        (size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])),
        default=0,
    )


@given(st.lists(st.text(LETTERS, max_size=6), max_size=12), stop_strings)
@example(["a", "b"], ["b", "ab"])
@example(["ab"], ["ab", "b"])
def test_any_cut_gives_what_the_whole_text_gives(pieces: list[str], stops: list[str]) -> None:
    matcher, emitted, seen, stopped = StopMatcher(stops), "", "", False
    for piece in pieces:
        seen += piece
        part, stop = matcher.feed(piece)
        emitted, stopped = emitted + part, stop is not None
        expected, found = whole_text_answer(seen, stops)
        assert stopped == found
        if stopped:
            assert emitted == expected
            break
        assert emitted == seen[: len(seen) - longest_beginning(seen, stops)], "holds back no more and no less"
    if not stopped:
        assert emitted + matcher.flush() == seen
        assert matcher.flush() == ""


def test_a_stop_string_across_three_pieces_is_cut_out() -> None:
    matcher = StopMatcher(["\n\nUser:"])
    assert matcher.feed("Hello.\n") == ("Hello.", None)
    assert matcher.feed("\nUs") == ("", None)
    assert matcher.feed("er: and more") == ("", "\n\nUser:")


def test_a_false_start_is_released_in_full() -> None:
    matcher = StopMatcher(["aab"])
    assert matcher.feed("aa") == ("", None)
    assert matcher.feed("a") == ("a", None), "the last two may still begin the stop string"
    assert matcher.feed("c") == ("aac", None)


def test_without_stop_strings_nothing_is_held_back() -> None:
    assert StopMatcher([]).feed("anything") == ("anything", None)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty stop string"):
        StopMatcher(["a", ""])


@given(st.lists(st.text(LETTERS, max_size=6), max_size=12), stop_strings, st.integers(0, 12))
def test_stops_that_do_not_count_yet_are_passed_over(pieces: list[str], stops: list[str], passed: int) -> None:
    """Against a search of the whole text whose matches must end behind the pieces that don't count."""
    matcher, emitted, stop = StopMatcher(stops, include=True), "", None
    for index, piece in enumerate(pieces):
        part, stop = matcher.feed(piece, counts=index >= passed)
        emitted += part
        if stop is not None:
            break
    whole, begin = "".join(pieces), len("".join(pieces[:passed]))
    ends = [end for end in range(begin + 1, len(whole) + 1) if any(whole[:end].endswith(s) for s in stops)]
    if not ends:
        assert (stop, emitted + matcher.flush()) == (None, whole)
        return
    assert emitted == whole[: ends[0]], "the stop string is part of the text"
    assert stop == max((s for s in stops if emitted.endswith(s)), key=len)


pieces_with_hidden = st.lists(st.one_of(st.text(LETTERS, max_size=4), st.just("<a>")), max_size=12)
letters_or_name = st.lists(st.sampled_from([*LETTERS, "<a>"]), min_size=1, max_size=4)
stops_with_hidden = st.lists(letters_or_name.map("".join), min_size=1, max_size=4)


@given(pieces_with_hidden, stops_with_hidden, st.booleans())
@example(["b", "<a>"], ["<a>"], False)
@example(["b", "\u20ac", "<a>", "a"], ["\u20ac<a>a", "b\u20aca"], True)
def test_hidden_pieces_complete_stop_strings_and_are_not_shown(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    """Against a search of the text with hidden pieces, and of that without them."""
    matcher, emitted, stop = StopMatcher(stops, include=include, hidden=["<a>"]), "", None
    for piece in pieces:
        part, stop = matcher.feed(piece, is_hidden=piece == "<a>")
        emitted += part
        if stop is not None:
            break
    whole = "".join(piece for piece in pieces if piece != "<a>")
    marked = [(character, piece != "<a>") for piece in pieces for character in piece]
    found = first_match(marked, stops)
    if found is None:
        assert (stop, emitted + matcher.flush()) == (None, whole)
        return
    begin, text = found
    assert stop == text
    assert emitted == "".join(character for character, is_shown in marked[:begin] if is_shown) + text * include


def first_match(marked: list[tuple[str, bool]], stops: list[str]) -> tuple[int, str] | None:
    for end in range(1, len(marked) + 1):
        everything = "".join(character for character, _ in marked[:end])
        places = [place for place in range(end) if marked[place][1]]
        shown = "".join(marked[place][0] for place in places)
        found = [(end - len(stop), stop) for stop in stops if "<a>" in stop and everything.endswith(stop)]
        if marked[end - 1][1]:
            found += [(places[-len(stop)], stop) for stop in stops if shown.endswith(stop)]
        if found:
            return min(found)
    return None
