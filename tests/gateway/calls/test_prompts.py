"""Prompts that are long, and callers that don't wait for them."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest
from running_gateway import Running
from starlette.types import Message

from cluster.errors import ServiceError
from cluster.text import BaseText
from gateway.calls.prompts import INLINE_CHARACTERS, Prompts, tokens_of
from gateway.catalog.threads import LeavableThreads
from gateway.http.errors import ClientGone

LONG = Prompts(["once upon a time " * (1 + INLINE_CHARACTERS // 17)])


@pytest.fixture
def gateway(reused: Running) -> Running:
    return reused


async def stays() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


async def leaves() -> Message:
    return {"type": "http.disconnect"}


@pytest.mark.parametrize("source", [LONG, Prompts(["once ", "upon "]), Prompts(["a time "] * 1000)])
def test_the_same_tokens_in_a_thread(stories_dir: Path, source: Prompts) -> None:
    async def main() -> None:
        text = BaseText(stories_dir)
        found = await tokens_of(source, text, LeavableThreads(1), 100_000, time.monotonic() + 60, stays)
        assert found == [text.tokenizer.encode(prompt).ids for prompt in source.prompts]

    asyncio.run(main())


def test_waiting_for_a_thread_ends_with_the_deadline_or_the_caller(stories_dir: Path) -> None:
    async def main() -> None:
        text, threads, go_on = BaseText(stories_dir), LeavableThreads(1), threading.Event()
        busy = asyncio.ensure_future(threads.run(lambda: go_on.wait(60)))
        await asyncio.sleep(0)
        with pytest.raises(ServiceError) as caught:
            await tokens_of(LONG, text, threads, 100_000, time.monotonic() + 0.05, stays)
        assert caught.value.type == "timeout"
        with pytest.raises(ClientGone):
            await tokens_of(LONG, text, threads, 100_000, time.monotonic() + 60, leaves)
        go_on.set()
        assert await busy is True
        assert len(await tokens_of(LONG, text, threads, 100_000, time.monotonic() + 60, stays)) == 1

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/invoke/stories260K", "/v1/completions"])
def test_what_can_not_fit_is_refused(gateway: Running, path: str) -> None:
    body = {"prompt": "x" * 900_000} | ({"model": "stories260K"} if path.startswith("/v1") else {})
    reply = gateway.client().post(path, json=body)
    assert reply.status_code == (400 if path.startswith("/v1") else 422)
    error = reply.json()["error"]
    assert error["param"] == "prompt"
    assert f"This model's maximum context length is {gateway.base.max_context} tokens" in error["message"]


def test_a_timeout_counts_from_receipt(gateway: Running) -> None:
    reply = gateway.client().post("/invoke/stories260K", json={"prompt": "a " * 2100, "timeout": 1e-6})
    assert (reply.status_code, reply.json()["error"]["type"]) == (504, "timeout")
