"""Frames on a byte stream: 4 bytes of big-endian length, then the body."""

from __future__ import annotations

MAX_FRAME = 64 << 20
"""Maximum length of a frame's body, in bytes. The largest legitimate frame is a prompt that fills the largest
context."""


class FrameError(ValueError):
    """The peer sent data that is not a frame of this protocol."""


def frame(body: bytes) -> bytes:
    """Returns the body as one frame."""
    return len(body).to_bytes(4, "big") + body


class Frames:
    """Decoder that splits a byte stream into frame bodies, however the stream is cut into chunks."""

    def __init__(self, limit: int = MAX_FRAME) -> None:
        self._buffer = bytearray()
        self._limit = limit

    def feed(self, chunk: bytes) -> list[bytes]:
        """Returns the bodies that `chunk` completes. Raises FrameError when one is over the limit."""
        self._buffer += chunk
        bodies: list[bytes] = []
        start = 0
        while len(self._buffer) - start >= 4:
            length = int.from_bytes(self._buffer[start : start + 4], "big")
            if length > self._limit:
                raise FrameError(f"frame of {length} bytes is over the limit of {self._limit}")
            if len(self._buffer) - start - 4 < length:
                break
            bodies.append(bytes(self._buffer[start + 4 : start + 4 + length]))
            start += 4 + length
        del self._buffer[:start]
        return bodies
