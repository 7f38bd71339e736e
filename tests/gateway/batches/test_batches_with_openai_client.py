"""Files and batches through the official client, as its users have it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types import Batch
from running_gateway import Running


@pytest.fixture
def client(deployed: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{deployed.url}/v1", api_key=deployed.keys["acme"], max_retries=0) as made:
        yield made


def call(number: int, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    fields = {"model": "pirate", "prompt": f"Once {number}", "max_tokens": 1 + number % 5} | body
    return {"custom_id": f"call-{number}", "method": "POST", "url": url, "body": fields}


def jsonl(*calls: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in calls)


def submit(client: openai.OpenAI, content: bytes, endpoint: Any = "/v1/completions", **options: Any) -> Batch:
    uploaded = client.files.create(file=("calls.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=uploaded.id, endpoint=endpoint, completion_window="24h", **options)


def ended(client: openai.OpenAI, batch: Batch) -> Batch:
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(0.02)
        batch = client.batches.retrieve(batch.id)
    return batch


def lines(client: openai.OpenAI, file_id: str | None) -> dict[str, dict[str, Any]]:
    """By custom id."""
    assert file_id is not None
    found = [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
    assert len({line["custom_id"] for line in found}) == len(found)
    return {line["custom_id"]: line for line in found}


def test_runs_a_file_of_several_functions(client: openai.OpenAI) -> None:
    calls = [call(number, model=["pirate", "stories260K", "nobody"][number % 3]) for number in range(30)]
    made = submit(client, jsonl(*calls), metadata={"night": "1"})
    assert (made.status, made.metadata) == ("validating", {"night": "1"})
    batch = ended(client, made)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (30, 20, 10)
    good, bad = lines(client, batch.output_file_id), lines(client, batch.error_file_id)
    assert good.keys() | bad.keys() == {each["custom_id"] for each in calls}
    assert bad.keys() == {f"call-{number}" for number in range(2, 30, 3)}
    for number in range(0, 30, 3):
        response = good[f"call-{number}"]["response"]
        assert response["status_code"] == 200
        assert response["body"]["choices"][0]["text"] == "".join(f" t{each}" for each in range(1 + number % 5))
    assert bad["call-2"]["response"]["status_code"] == 404
    assert bad["call-2"]["response"]["body"]["error"]["code"] == "not_found"
