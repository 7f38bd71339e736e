"""A network between a client and a server on this host: a rate that all connections share, and a delay before each
answer.

    python -m benchmarks.common.slow_link PORT BYTES_PER_SECOND SECONDS

Passes TCP connections on to PORT, prints its own port, and ends when its standard input does. Only what the server
sends is held back: the delay counts from a request's last bytes, the rate is shared by all connections.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

PIECE = 1 << 16
AHEAD = 64
Pieces = asyncio.Queue[tuple[float, bytes]]
"""Each with the loop's time from which it may cross; an empty one is the end."""


class Link:
    def __init__(self, port: int, rate: float, delay: float) -> None:
        self.port, self.rate, self.delay = port, rate, delay
        self._free = 0.0
        """loop time at which all that was sent has crossed"""
        self._open: set[asyncio.Task[None]] = set()
        """The loop itself holds connections that wait by weak references only."""

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Begins to pass one connection on, until either side has ended it."""
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to, out = await asyncio.open_connection("127.0.0.1", self.port)
        requested_at, pieces = [0.0], Pieces(AHEAD)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._requests(reader, out, requested_at))
                group.create_task(self._read_answers(to, pieces, requested_at))
                group.create_task(self._send_answers(pieces, writer))
        except* ConnectionError:
            pass  # one side went away, as it may
        finally:
            out.close()
            writer.close()

    async def _requests(
        self, reader: asyncio.StreamReader, out: asyncio.StreamWriter, requested_at: list[float]
    ) -> None:
        while piece := await reader.read(PIECE):
            requested_at[0] = asyncio.get_running_loop().time()
            out.write(piece)
            await out.drain()
        out.write_eof()

    async def _read_answers(self, to: asyncio.StreamReader, pieces: Pieces, requested_at: list[float]) -> None:
        while piece := await to.read(PIECE):
            await pieces.put((max(asyncio.get_running_loop().time(), requested_at[0] + self.delay), piece))
        await pieces.put((0.0, b""))

    async def _send_answers(self, pieces: Pieces, writer: asyncio.StreamWriter) -> None:
        """A piece crosses after those before it, not after this task was woken: timers are late by up to a
        millisecond, in which a piece crosses."""
        loop = asyncio.get_running_loop()
        while (timed_piece := await pieces.get())[1]:
            may_begin, piece = timed_piece
            self._free = max(may_begin, self._free) + len(piece) / self.rate
            await asyncio.sleep(self._free - loop.time())
            writer.write(piece)
            await writer.drain()
        writer.write_eof()


@contextmanager
def slow_link(port: int, rate: float, delay: float) -> Iterator[int]:
    """Yields the port of such a network, in a separate process, in front of `port` on this host."""
    command = [sys.executable, "-m", "benchmarks.common.slow_link", str(port), str(rate), str(delay)]
    with subprocess.Popen(
        command, cwd=Path(__file__).parents[2], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.stdin.close()


@contextmanager
def slow_s3(rate: float, delay: float) -> Iterator[None]:
    """Services that start meanwhile reach the S3 server of boto3's environment by such a network."""
    near = os.environ["AWS_ENDPOINT_URL_S3"]
    server = urlsplit(near).port
    assert server is not None
    with slow_link(server, rate, delay) as port:
        os.environ["AWS_ENDPOINT_URL_S3"] = f"http://127.0.0.1:{port}"
        try:
            yield
        finally:
            os.environ["AWS_ENDPOINT_URL_S3"] = near


async def main(port: int, rate: float, delay: float) -> None:
    server = await asyncio.start_server(Link(port, rate, delay).accept, "127.0.0.1", 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])))
