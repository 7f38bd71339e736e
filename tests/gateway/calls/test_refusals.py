"""Fields of other services: refused with the nearest thing that works, or accepted where they ask for nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from running_gateway import Running

from gateway.calls.unsupported_fields import CHAT_UNSUPPORTED, DOCS, PROMPT_UNSUPPORTED, UNSUPPORTED

ROOT = Path(__file__).parents[3]
ROUTES: dict[str, dict[str, Any]] = {
    "/invoke/stories260K": {"prompt": "Once", "max_tokens": 1},
    "/v1/completions": {"model": "stories260K", "prompt": "Once", "max_tokens": 1},
    "/v1/chat/completions": {"model": "stories260K", "messages": [{"role": "user", "content": "Once"}]},
}
EXPECTED = {
    "best_of": "best_of is not served; use n, which returns all choices, and choose by logprobs",
    "suffix": "suffix is not served; put what comes after into the prompt",
    "priority": "priority is not served; the function's slo_class says which calls go first",
    "use_beam_search": "use_beam_search is not served; use temperature, top_p, top_k and n",
}
"""The full text of some; of all the form is checked."""


FIELDS = dict.fromkeys(ROUTES, UNSUPPORTED | PROMPT_UNSUPPORTED)
FIELDS["/v1/chat/completions"] = UNSUPPORTED | CHAT_UNSUPPORTED


@pytest.fixture
def gateway(reused: Running) -> Running:
    return reused


@pytest.fixture(scope="module")
def anchor() -> str:
    page, _, section = DOCS.partition("#")
    headings = [line.lstrip("# ").lower() for line in (ROOT / page).read_text().splitlines() if line.startswith("#")]
    assert section in {heading.replace(" ", "-") for heading in headings}
    return DOCS


def test_each_refusal_names_what_works_and_a_section_that_exists(gateway: Running, anchor: str) -> None:
    client = gateway.client()
    for path, field, entry in ((path, *item) for path, fields in FIELDS.items() for item in fields.items()):
        reply = client.post(path, json={**ROUTES[path], field: {"anything": [1]}})
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400 if path.startswith("/v1") else 422, field)
        assert error["message"] == f"{field} is not served; {entry.instead} ({anchor})"
        assert error["message"].startswith(EXPECTED.get(field, ""))
    assert EXPECTED.keys() <= UNSUPPORTED.keys()


def test_values_that_ask_for_nothing_are_accepted(gateway: Running) -> None:
    client, path = gateway.client(), "/v1/completions"
    for count in range(max(len(entry.neutral) for entry in UNSUPPORTED.values())):
        fields = {field: entry.neutral[min(count, len(entry.neutral) - 1)] for field, entry in UNSUPPORTED.items()}
        reply = client.post(path, json={**ROUTES[path], **fields})
        assert reply.status_code == 200, reply.text
