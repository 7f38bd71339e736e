"""The node's HTTP routes, over a real port and a real engine socket: what works."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from cluster.messages import Adapter, Done, Sampling, Started, Token, TokenLogprob, TopLogprob
from cluster.news import Resident
from cluster.secret import authorization
from cluster.text import BaseText
from node_agent.api.app import listen, url_of
from node_agent.ipc import Generated, Submit, Top
from tests.node_agent.scripted_engine import READY, admitted, finished, stats, tokens
from tests.node_agent.served_node import Node, request_of, run_scenario, served_node


def test_a_request_becomes_events(tmp_path: Path, stories_dir: Path) -> None:
    ids = BaseText(stories_dir).encode_prompt("Once upon a time")

    async def scenario() -> None:
        async with served_node(tmp_path, stories_dir) as node:
            engine = await node.engine()
            async with node.generate(request_of(timeout=30.0)) as stream:
                submit = await engine.hear_submit()
                assert (submit.id, submit.token_ids, submit.max_tokens, submit.timeout) == ("r1", [1], 100, 30.0)
                await engine.say(
                    admitted("r1", "host"), *tokens("r1", ids[1:]), finished("r1", "stop", cached_tokens=7)
                )
                events = await stream.rest()
            assert events[0] == Started(node="n1", cold_start="host")
            text = [event for event in events if isinstance(event, Token)]
            assert [event.index for event in text] == list(range(len(ids) - 1))
            assert [event.token_ids for event in text] == [[token] for token in ids[1:]]
            done = events[-1]
            assert isinstance(done, Done)
            assert "".join(event.text for event in text) + done.text == "Once upon a time"
            assert (done.finish_reason, done.prompt_tokens, done.completion_tokens) == ("stop", 1, len(ids) - 1)
            assert (done.timing.queue, done.timing.prefill) == (0.25, 0.5)
            assert done.cached_tokens == 7

    run_scenario(scenario())


def test_everything_that_the_engine_needs_is_passed_on(tmp_path: Path, stories_dir: Path) -> None:
    sampling = Sampling(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, seed=2**62, choice=1, logprobs=2)
    adapter = Adapter(digest="d" * 64, artifact="artifacts/v1/base/digest", bytes=1000, ranks=(4, 8))

    async def scenario() -> None:
        async with served_node(tmp_path, stories_dir) as node:
            engine = await node.engine()
            request = request_of(token_ids=[1, 2, 3], sampling=sampling, adapter=adapter, ignore_eos=True)
            async with node.generate(request) as stream:
                assert await engine.hear() == Submit(request)
                await engine.say(finished("r1"))
                await stream.rest()

    run_scenario(scenario())


def test_tokens_arrive_one_by_one_while_others_run(tmp_path: Path, stories_dir: Path) -> None:
    async def scenario() -> None:
        async with served_node(tmp_path, stories_dir) as node:
            engine = await node.engine()
            async with node.generate(request_of("a")) as first, node.generate(request_of("b")) as second:
                assert {(await engine.hear_submit()).id, (await engine.hear_submit()).id} == {"a", "b"}
                await engine.say(admitted("a"), admitted("b"))
                await first.next()
                await second.next()
                for token_id in (403, 407):
                    await engine.say(*tokens("a", [token_id]), *tokens("b", [token_id + 1]))
                    for stream, expected in ((first, token_id), (second, token_id + 1)):
                        event = await stream.next()
                        assert isinstance(event, Token)
                        assert event.token_ids == [expected]
                await engine.say(finished("b"), finished("a"))
                assert isinstance(await first.next(), Done)
                assert isinstance(await second.next(), Done)

    run_scenario(scenario())


def test_log_probabilities_name_their_tokens(tmp_path: Path, stories_dir: Path) -> None:
    text = BaseText(stories_dir)
    chosen, other = text.encode_prompt("the")[-1], text.tokenizer.token_to_id("<0xE4>")

    async def scenario() -> None:
        async with served_node(tmp_path, stories_dir) as node:
            engine = await node.engine()
            async with node.generate(request_of(sampling=Sampling(logprobs=2))) as stream:
                await engine.hear_submit()
                top = Top(-0.5, [(chosen, -0.5), (other, -2.0)])
                await engine.say(Generated("r1", chosen, top), finished("r1"))
                token, _ = await stream.rest()
            assert isinstance(token, Token)
            names = [TopLogprob(" the", chosen, -0.5), TopLogprob("\ufffd", other, -2.0, b"\xe4")]
            assert token.logprobs == [TokenLogprob(" the", chosen, -0.5, names)]

    run_scenario(scenario())


@pytest.mark.parametrize("given", [None, "", "Bearer wrong", "Bearer é"])
def test_every_route_but_healthz_needs_the_secret(tmp_path: Path, stories_dir: Path, given: str | None) -> None:
    headers = {} if given is None else {"authorization": given}
    routes = [("GET", "/record"), ("POST", "/drain"), ("POST", "/undrain"), ("POST", "/generate"), ("GET", "/nothing")]

    async def scenario() -> None:
        async with served_node(tmp_path, stories_dir) as node:
            node.session.headers.clear()
            for method, path in routes:
                async with node.session.request(method, node.url + path, headers=headers) as response:
                    assert response.status == 401
                    assert (await response.json())["error"]["type"] == "unauthenticated"
            async with node.session.get(node.url + "/healthz") as response:
                assert response.status == 200
            node.session.headers.update(authorization(node.secret))
            assert (await node.record()).state == "warming"

    run_scenario(scenario())


async def post(node: Node, path: str) -> None:
    async with node.session.post(node.url + path) as response:
        assert response.status == 204


def test_a_draining_node_ends_what_runs_and_takes_nothing_new(tmp_path: Path, stories_dir: Path) -> None:
    async def scenario() -> None:
        async with served_node(tmp_path, stories_dir) as node:
            engine = await node.engine()
            async with node.generate(request_of("old")) as running:
                await engine.hear_submit()
                await post(node, "/drain")
                assert (await node.gateway.record_where(lambda r: r.state == "draining")).id == "n1"
                async with node.generate(request_of("new")) as refused:
                    (event,) = await refused.rest()
                assert (event.type, event.retryable) == ("unavailable", True)
                await engine.say(admitted("old"), *tokens("old", [403]), finished("old"))
                assert isinstance((await running.rest())[-1], Done)
            await post(node, "/undrain")
            assert (await node.record()).state == "ready"
            async with node.generate(request_of("new")) as stream:
                await engine.hear_submit()
                await engine.say(finished("new"))
                assert isinstance((await stream.rest())[-1], Done)

    run_scenario(scenario())


def test_the_record_tells_what_is_so(tmp_path: Path, stories_dir: Path) -> None:
    resident = Resident(digest="d" * 64, tier="device", bytes=1000, in_use=1)

    async def scenario() -> None:
        async with served_node(tmp_path, stories_dir, queue_limit=7) as node:
            cold = await node.record()
            assert (cold.state, cold.base, cold.base_id, cold.url) == ("warming", "", "stories260K", node.url)
            assert cold.error
            engine = await node.engine()
            async with node.generate(request_of("a")), node.generate(request_of("b")):
                await engine.hear_submit()
                await engine.hear_submit()
                await engine.say(
                    admitted("a"),
                    stats(
                        running=1, queued=1, batch_ranks=[8], batch_contexts=[5], batch_slots=[0], residents=[resident]
                    ),
                )
                record = await node.record_where(lambda r: r.running == 1)
                assert (record.queued, record.queue_limit, record.state, record.error) == (1, 7, "ready", "")
                assert (record.base, record.max_context) == (READY.base, READY.max_context)
                assert (record.kv_blocks_free, record.kv_blocks, record.block_tokens) == (60, 64, 16)
                assert (record.max_rank, record.contexts) == (8, 5)
                await node.record()
                assert node.residents == [resident]
                assert record.epoch == cold.epoch
                assert record.seq > cold.seq
                await engine.say(finished("a"), finished("b"))
            idle = await node.record_where(lambda r: not r.running)
            assert idle.queued == 0

    run_scenario(scenario())


def test_the_port_is_not_open_to_other_hosts(tmp_path: Path, stories_dir: Path) -> None:
    async def scenario() -> None:
        async with served_node(tmp_path, stories_dir) as node:
            assert node.url.startswith("http://127.0.0.1:")
            assert node.socket.parent.stat().st_mode & 0o077 == 0
            assert msgspec.to_builtins(await node.record())["url"] == node.url

    run_scenario(scenario())


@pytest.mark.parametrize(("host", "url"), [("0.0.0.0", "http://127.0.0.1:{}"), ("127.0.0.1", "http://127.0.0.1:{}")])
def test_a_node_on_all_addresses_announces_the_one_towards_the_gateway(host: str, url: str) -> None:
    with listen(host, 0) as listener:
        port = listener.getsockname()[1]
        assert url_of(listener, "http://127.0.0.1:8080/") == url.format(port)


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this machine has no IPv6")
def test_an_address_of_version_6_is_bracketed() -> None:
    with listen("::1", 0) as listener:
        assert url_of(listener, "http://127.0.0.1:1") == f"http://[::1]:{listener.getsockname()[1]}"
