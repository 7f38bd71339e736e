"""What whoever reaches a node's port, and has no secret, can send: heads without end, and heads that do not come."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from cluster.http_protocol import HEAD_BYTES
from tests.node_agent.served_node import Node, run_scenario, served_node

START = b"POST /generate HTTP/1.1\r\nhost: x\r\n"


async def connect(node: Node) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = node.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def pour(writer: asyncio.StreamWriter, piece: bytes, most: int) -> None:
    """Returns when all of it was taken."""
    for _ in range(most // len(piece)):
        writer.write(piece)
        await writer.drain()


@pytest.mark.parametrize(
    ("begun", "piece"),
    [
        (START, b"x-a: " + b"y" * 1000 + b"\r\n"),
        (START + b"x-endless: ", b"y" * 1000),
        (b"GET /", b"a" * 1000),
        (START + b"transfer-encoding: chunked\r\n\r\n0\r\n", b"trailer: " + b"y" * 1000 + b"\r\n"),
    ],
)
def test_endless_heads_are_cut_off(tmp_path: Path, stories_dir: Path, begun: bytes, piece: bytes) -> None:
    async def scenario() -> None:
        async with served_node(tmp_path, stories_dir) as node:
            _, writer = await connect(node)
            writer.write(begun)
            with pytest.raises(OSError):
                await pour(writer, piece * 64, 32 << 20)  # socket buffers hold some of it
            assert (await node.record()).id == "n1"

    run_scenario(scenario())


@pytest.mark.parametrize("end", [b"", b"\r\n\r\n"])
def test_a_head_over_the_limit_is_told(tmp_path: Path, stories_dir: Path, end: bytes) -> None:
    async def scenario() -> None:
        async with served_node(tmp_path, stories_dir) as node:
            reader, writer = await connect(node)
            writer.write(START + b"x-a: " + b"y" * HEAD_BYTES + end)
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 431 ")
            assert json.loads(body)["error"]["type"] == "head_too_large"
            writer.close()

    run_scenario(scenario())


@pytest.mark.parametrize("sent", [b"", START, START + b"content-length: 100\r\n\r\nhalf"])
def test_who_does_not_go_on_is_closed(
    tmp_path: Path, stories_dir: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr("cluster.http_protocol.HEAD_SECONDS", 0.2)

    async def scenario() -> None:
        async with served_node(tmp_path, stories_dir) as node:
            reader, writer = await connect(node)
            writer.write(sent)
            got = await reader.read()
            assert got == b"" or got.startswith(b"HTTP/1.1 401")
            writer.close()

    run_scenario(scenario())
