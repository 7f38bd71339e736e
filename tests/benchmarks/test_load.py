"""The load generator against a real streaming server: what it sends and when, and what it makes of every ending."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import time
from collections.abc import Coroutine
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from scripted_server import scripted_server

from benchmarks.common.latency import Sample, summary
from benchmarks.common.load import OpenAiServer, Planned, check_url, closed_loop, open_loop, open_session, plan, poisson
from benchmarks.serve.node_call import NodeServer
from cluster.messages import ColdStart as Cold
from cluster.messages import Done, Event, Failed, Timing, Token, encode_event
from tests.benchmarks.studies import run_study

ROOT = Path(__file__).parents[2]
TOKENS = 6


def run(scenario: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(280):
            await scenario

    asyncio.run(bounded())


def test_what_is_sent_and_noted() -> None:
    async def scenario() -> None:
        async with scripted_server() as server, open_session("a-key") as session:
            (sample,) = await closed_loop(OpenAiServer(session, server.url, TOKENS), [Planned("ok", "to be")], 1)
            assert server.keys == ["Bearer a-key"]
            assert server.bodies == [
                {
                    "model": "ok", "prompt": "to be", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True,
                    "stream": True, "stream_options": {"include_usage": True},
                }
            ]  # fmt: skip
            assert (sample.error, sample.prompt_tokens, sample.output_tokens) == ("", 5, TOKENS)
            assert len(sample.times) == TOKENS, "neither the end of the choice nor the usage is a token"
            moments = [sample.sent, *sample.times, sample.end]
            assert moments == sorted(moments)
            assert sample.scheduled_at is None

    run(scenario())


ENDINGS = {
    "404": "404",
    "429": "429",
    "500": "500",
    "elsewhere": "307",
    "broken": "cut off",
    "cut off": "cut off",
    "refused in stream": "in stream: node_failed",
    "garbage": "malformed",
    "no usage": "no usage",
}


def test_every_error_is_counted() -> None:
    models = [*ENDINGS, "ok", "429"]

    async def scenario() -> None:
        async with scripted_server() as server, open_session() as session:
            samples = await closed_loop(OpenAiServer(session, server.url, TOKENS), plan(models, len(models), 3, 1), 4)
            assert [sample.model for sample in samples] == models
            assert {sample.model: sample.error for sample in samples} == ENDINGS | {"ok": ""}
            found = summary(samples)
            assert (found["requests"], found["ok"], found["errors"]) == (11, 1, 10)
            kinds = {name: value for name, value in found.items() if name.startswith("error_")}
            assert sum(kinds.values()) == 10
            assert (kinds["error_429"], kinds["error_cut off"], kinds["error_307"]) == (2, 2, 1)
            assert found["output_tokens"] == TOKENS, "what failed requests got is no work done"
            assert server.elsewhere == 0, "the key went with a redirect"
            assert all(sample.end >= sample.sent > 0 for sample in samples)

    run(scenario())


def test_a_silent_server_and_none() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{probe.getsockname()[1]}"

        async def scenario() -> None:
            async with scripted_server() as server, open_session(seconds=0.3) as session:
                silent = await OpenAiServer(session, server.url, TOKENS)(Planned("silent", "x"))
                assert silent.error == "timeout"
                refused = await OpenAiServer(session, nobody, TOKENS)(Planned("ok", "x"))
                assert refused.error == "connection: ClientConnectorError"
                assert summary([silent, refused])["errors"] == 2

        run(scenario())


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_closed_loop_keeps_so_many_open(concurrency: int) -> None:
    async def scenario() -> None:
        async with scripted_server(together=concurrency) as server, open_session() as session:
            planned = plan(["a", "b"], 4 * concurrency, 3, 0)
            samples = await closed_loop(OpenAiServer(session, server.url, 2), planned, concurrency)
            assert server.most_at_once == concurrency
            assert [sample.model for sample in samples] == [request.model for request in planned]
            assert summary(samples)["ok"] == len(planned)

    run(scenario())


def test_an_open_loop_waits_for_nobody() -> None:
    """The server answers none before all have come."""

    async def scenario() -> None:
        count = 20
        async with scripted_server(together=count) as server, open_session() as session:
            planned, due = plan(["a"], count, 3, 0), poisson(1000.0, count, 0)
            samples = await open_loop(OpenAiServer(session, server.url, 2), planned, due)
            assert server.most_at_once == count
            assert [body["prompt"] for body in server.bodies] == [request.prompt for request in planned]
            for a, b, first, second in zip(samples, samples[1:], due, due[1:], strict=False):
                assert (
                    a.scheduled_at is not None
                    and b.scheduled_at is not None
                    and b.scheduled_at - a.scheduled_at == pytest.approx(second - first)
                )
            assert all(sample.late is not None and sample.late > 0 for sample in samples)

    run(scenario())


def test_a_held_up_open_loop_says_so() -> None:
    """A client whose event loop stands still for 50 ms sends what was due meanwhile late, and never skips it."""

    async def call(request: Planned) -> Sample:
        sample = Sample(request.model, sent=time.perf_counter(), prompt_tokens=1, output_tokens=1)
        if request.model == "slow":
            time.sleep(0.05)  # noqa: ASYNC251 - holding up the event loop is what is tested
        sample.end = time.perf_counter()
        sample.times = [sample.end]
        return sample

    async def scenario() -> None:
        planned = [Planned("slow", ""), Planned("b", ""), Planned("c", "")]
        samples = await open_loop(call, planned, [0.0, 0.001, 0.002])
        found = summary(samples)
        assert found["requests"] == 3
        assert found["late_max_ms"] >= 48
        assert [sample.model for sample in samples] == ["slow", "b", "c"]

    run(scenario())


def test_an_errand_that_raises_ends_the_load() -> None:
    """A defect of the client is no error of the server."""

    async def call(request: Planned) -> Sample:
        raise ArithmeticError(request.model)

    for load in (open_loop(call, [Planned("a", "")], [0.0]), closed_loop(call, [Planned("a", "")], 2)):
        with pytest.raises(ExceptionGroup) as caught:
            asyncio.run(load)
        assert caught.group_contains(ArithmeticError, match="a")


@given(rate=st.floats(0.01, 1e4), requests=st.integers(0, 50), seed=st.integers(0, 1 << 32))
def test_a_schedule_is_the_seed_s(rate: float, requests: int, seed: int) -> None:
    times = poisson(rate, requests, seed)
    assert times == poisson(rate, requests, seed)
    assert len(times) == requests
    assert all(0 <= a <= b for a, b in pairwise([0.0, *times]))
    assert times == pytest.approx([at * 2 for at in poisson(2 * rate, requests, seed)])


def test_gaps_are_exponential() -> None:
    gaps = [b - a for a, b in pairwise([0.0, *poisson(8.0, 20_000, 5)])]
    for units in (0.1, 0.5, 1.0, 3.0):
        share = sum(gap > units / 8.0 for gap in gaps) / len(gaps)
        assert share == pytest.approx(math.exp(-units), abs=0.015)


@given(models=st.lists(st.sampled_from("abc"), min_size=1, max_size=4), requests=st.integers(0, 30), seed=st.integers())
def test_a_plan_is_the_seed_s(models: list[str], requests: int, seed: int) -> None:
    planned = plan(models, requests, 20, seed)
    assert planned == plan(models, requests, 20, seed)
    assert [request.model for request in planned] == (models * requests)[:requests]
    assert all(len(request.prompt.split(" ")) == 20 for request in planned)
    assert len({request.prompt for request in planned}) == requests


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://127.0.0.1:8080", "http://127.0.0.1:8080"),
        ("https://a.example/", "https://a.example"),
        ("http://a.example/v1/", "http://a.example"),
        ("http://a.example/models/v1", "http://a.example/models"),
    ],
)
def test_urls(url: str, base: str) -> None:
    assert check_url(url) == base


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("127.0.0.1:8080", "no http"),
        ("ftp://a.example", "no http"),
        ("http://", "no http"),
        ("http://me:secret@a.example", "key file"),
        ("http://a.example?key=1", "query"),
    ],
)
def test_refused_urls(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        check_url(url)
    assert "secret" not in str(caught.value)


DONE = Done("length", 3, 2, 0, Timing(0.0, 0.0, 0.0, Cold("none", "none", 0.0, 0.0)))
TWO = [Token("a", [5], 0), Token("", [6], 1)]


@pytest.mark.parametrize(
    ("events", "error", "tokens"),
    [
        ([*TWO, DONE], "", 2),
        ([*TWO[:1], Failed("node_failed", "gone")], "in stream: node_failed", 1),
        (TWO, "cut off", 2),
    ],
)
def test_a_node_s_stream(stories_dir: Path, events: list[Event], error: str, tokens: int) -> None:
    async def generate(request: web.Request) -> web.Response:
        assert request.headers["authorization"] == "Bearer the-secret"
        return web.Response(body=b"".join(map(encode_event, events)))

    async def scenario() -> None:
        app = web.Application()
        app.router.add_post("/generate", generate)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with open_session("the-secret") as session:
            sample = await NodeServer(session, url, "fingerprint", stories_dir, 2)(Planned("base", "Once"))
        await runner.cleanup()
        assert (sample.error, len(sample.times)) == (error, tokens)
        assert sample.output_tokens == (0 if error else 2)

    run(scenario())


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """One run each way against a real server; the key is in no output."""
    key, file = tmp_path / "key", tmp_path / "report.json"
    key.write_text("sk-hidden\n")

    async def scenario() -> None:
        async with scripted_server() as server:
            for loop in (["--rate", "200"], ["--concurrency", "3"]):
                arguments = [
                    "--url", f"{server.url}/v1", "--models", "ok,429", "--key-file", str(key), *loop,
                    "--requests", "10", "--prompt-tokens", "7", "--output-tokens", "3", "--seed", "2",
                    "--json", str(file),
                ]  # fmt: skip
                await asyncio.to_thread(run_study, monkeypatch, "serve.serve", *arguments)
                assert "sk-hidden" not in "".join(capfd.readouterr()) + file.read_text()
                document = json.loads(file.read_text())
                found = document["figures"]
                assert (found["requests"], found["ok"], found["error_429"]) == (10, 5, 5)
                assert (found["output_tokens"], found["warm_up_failed"]) == (15, 1)
                assert ("late_p99_ms" in found) == (loop[0] == "--rate")
                assert [row["model"] for row in document["rows"]] == ["ok", "429"] * 5
                assert all(len(row["times_ms"]) == 3 for row in document["rows"][::2])
            assert set(server.keys) == {"Bearer sk-hidden"}
            assert len(server.bodies) == 2 * (10 + 2)

    run(scenario())
