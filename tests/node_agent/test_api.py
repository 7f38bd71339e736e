"""POST /generate and the node's other routes, over a real port and a real engine socket."""

from __future__ import annotations

from pathlib import Path

from scripted_engine import admitted, finished, tokens
from served_node import request_of, run_scenario, served_node

from cluster.messages import Done, Started, Token
from cluster.text import BaseText


def test_a_request_becomes_events(tmp_path: Path, stories_dir: Path) -> None:
    ids = BaseText(stories_dir).encode_prompt("Once upon a time")

    async def scenario() -> None:
        async with served_node(tmp_path, stories_dir) as node:
            engine = await node.engine()
            async with node.generate(request_of(timeout=30.0)) as stream:
                submit = await engine.hear_submit()
                assert (submit.id, submit.token_ids, submit.max_tokens, submit.timeout) == ("r1", [1], 100, 30.0)
                await engine.say(admitted("r1", "host"), *tokens("r1", ids[1:]), finished("r1", "stop"))
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
            await engine.close()

    run_scenario(scenario())
