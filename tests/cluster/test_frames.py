from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.frames import FrameError, Frames, frame


@given(bodies=st.lists(st.binary(max_size=50), max_size=8), cuts=st.lists(st.integers(1, 20), min_size=1, max_size=8))
def test_frames_survive_any_cuts(bodies: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(frame(body) for body in bodies)
    frames, found, at, turn = Frames(), [], 0, 0
    while at < len(stream):
        size = cuts[turn % len(cuts)]
        found += frames.feed(stream[at : at + size])
        at, turn = at + size, turn + 1
    assert found == bodies


def test_a_frame_over_the_limit_is_refused_before_it_is_there() -> None:
    with pytest.raises(FrameError, match="over the limit"):
        Frames(limit=10).feed((11).to_bytes(4, "big"))
    assert Frames(limit=10).feed(frame(b"x" * 10)) == [b"x" * 10]
