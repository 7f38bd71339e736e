"""Suggests a route for a path that none has: another prefix, a name with a slash, a typing error, or another API's."""

from __future__ import annotations

import re
from collections.abc import Sequence

from adapters.nearest import nearest

CHATS = "use POST /v1/chat/completions"
ELSEWHERE = {
    "embeddings": "embeddings are not served: the base generates text",
    "responses": f"OpenAI's responses are not served; {CHATS}",
    "messages": f"Anthropic's messages are not served; {CHATS}",
    "api/chat": f"Ollama's API is not served; {CHATS}",
    "api/generate": "Ollama's API is not served; use POST /v1/completions",
    "generate": "use POST /v1/completions, or POST /invoke/{target}",
    "rerank": "the base generates text, and ranks none",
    "score": "to score a prompt use POST /v1/completions with prompt_logprobs",
    "pooling": "the base generates text alone",
    "classify": "the base generates text alone",
    "moderations": "the base generates text alone",
    "images/generations": "the base generates text alone",
    "audio/speech": "the base generates text alone",
    "audio/transcriptions": "the base reads text alone",
}
"""Replacements of routes that other services have, by the ends of their paths."""
_PARAMETER = re.compile(r"\{[^}]*\}")
MAX_COMPARED = 200
"""Maximum characters of a path for which a route is sought."""


def route_hint(path: str, routes: Sequence[str]) -> str:
    """Returns a suffix for the message about a path without a route; empty if no route is near. `routes`: paths, with
    parameters in braces."""
    if len(path) > MAX_COMPARED:
        return ""
    plain = path.rstrip("/")
    fixed = [route for route in routes if "{" not in route]
    if route := next((route for route in fixed if f"/v1{plain}" == route or plain.endswith(route)), None):
        return f"; did you mean {route}?"
    if instead := next((text for end, text in ELSEWHERE.items() if plain.endswith(f"/{end}")), None):
        return f"; {instead}"
    for route in routes:
        before, parameter, after = route.partition("{")
        inside = plain.removeprefix(before)
        is_last = parameter and _PARAMETER.fullmatch("{" + after)
        if is_last and before != "/" and inside != plain and "/" in inside:
            return f"; did you mean {route}? A name has no slash"
    close = nearest(plain, [*fixed, *(_PARAMETER.sub("NAME", route) for route in routes if "{" in route)])
    return f"; did you mean {close[0]}?" if close else ""
