"""A path without a route: the reply names the nearest one, or what to use instead."""

from __future__ import annotations

import pytest
from running_gateway import Running

from gateway.app import PATHS
from gateway.http.nearest_route import ELSEWHERE


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/chat/completions", "did you mean /v1/chat/completions?"),
        ("/api/v1/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/v1/models", "did you mean /v1/models?"),
        ("/v1/embeddings", "embeddings are not served"),
        ("/v1/messages", "Anthropic's messages are not served; use POST /v1/chat/completions"),
        ("/v1/chat/completion", "did you mean /v1/chat/completions?"),
        ("/functions/org/name", "did you mean /functions/{name}? A name has no slash"),
        ("/function", "did you mean /functions?"),
        ("/nothing/of/the/kind", ""),
        ("/" + "x" * 3000, ""),
    ],
)
def test_a_404_names_the_nearest_route(reused: Running, path: str, hint: str) -> None:
    reply = reused.client().post(path, json={})
    assert reply.status_code == 404
    message = reply.json()["error"]["message"]
    assert message.startswith("no such route") and hint in message
    assert bool(hint) == (message != "no such route")


def test_what_is_served_elsewhere_is_not_served_here() -> None:
    assert not [end for end in ELSEWHERE for path in PATHS if path.endswith(f"/{end}")]
    named = {part for text in ELSEWHERE.values() for part in text.split() if part.startswith("/")}
    assert {part.rstrip(",;") for part in named} <= set(PATHS)
