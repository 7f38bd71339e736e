"""What chaos says of asynchronous calls and batches, with an API that tells of each kind of harm."""

from __future__ import annotations

import json
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from benchmarks.faults import jobs
from benchmarks.faults.jobs import BATCHED, ROWS, WRONG, Jobs
from gateway.batches.run import FLUSH_LINES

PROMPTS = ["a", "b", "a"]
TEXTS = {"a": "said a", "b": "said b"}


class Api:
    """An event and a batch of three calls, all right."""

    def __init__(self) -> None:
        output = {"text": TEXTS["a"]}
        self.event: dict[str, Any] = {
            "state": "succeeded",
            "retries": 2,
            "attempts": [{}] * 3,
            "result": {"output": output},
        }
        self.batch: dict[str, Any] = {
            "id": "batch_1", "status": "completed", "output_file_id": "out", "error_file_id": None,
            "request_counts": {"failed": 0},
        }  # fmt: skip
        self.lines = [_line(at, TEXTS[prompt]) for at, prompt in enumerate(PROMPTS)]
        self.runs = 3
        self.asked: Counter[str] = Counter()
        self.changes = False

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.asked[path] += 1
        match path:
            case "/invocations/inv_1":
                again = self.changes and self.asked[path] > 1
                return httpx.Response(200, json={**self.event, "state": "failed" if again else self.event["state"]})
            case "/v1/batches":
                return httpx.Response(200, json={"data": [self.batch]})
            case "/v1/batches/batch_1":
                return httpx.Response(200, json=self.batch)
            case "/v1/files/out/content":
                return httpx.Response(200, text="\n".join(map(json.dumps, self.lines)))
            case "/usage":
                return httpx.Response(200, json={"rows": [{"function": BATCHED, "requests": self.runs}]})
        return httpx.Response(404)


def _line(at: int, text: str) -> dict[str, Any]:
    body = {"output": {"text": text}}
    return {"custom_id": str(at), "response": {"status_code": 200, "body": body}}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "USAGE_S", 0.0)
    monkeypatch.setattr(time, "sleep", lambda _: None)


def found_by(api: Api, harms: int = 0) -> Counter[str]:
    jobs = Jobs(SimpleNamespace(), 0, 40, TEXTS)  # type: ignore[arg-type]
    jobs._events, jobs._batches = {"inv_1": "a"}, {"batch_1": PROMPTS}
    with httpx.Client(base_url="http://gateway", transport=httpx.MockTransport(api)) as client:
        deadline = time.monotonic() - 1.0  # what has not ended now is lost
        _, events = jobs._check_events(client, deadline)
        _, batches = jobs._check_batches(client, deadline, harms)
    found = +(events + batches)
    assert set(found) <= set(WRONG)
    return found


def test_nothing_is_wrong_where_all_ended_as_it_should() -> None:
    assert found_by(Api()) == Counter()


def test_each_harm_is_found() -> None:
    api = Api()
    api.event["state"] = "running"
    assert found_by(api) == {"events_lost": 1}
    api = Api()
    api.event["attempts"] = [{}] * 4
    assert found_by(api) == {"events_overrun": 1}
    api = Api()
    api.changes = True
    assert found_by(api) == {"events_changed": 1}
    api = Api()
    api.event["result"] = {"output": {"text": "else"}}
    assert found_by(api) == {"events_wrong": 1}
    api = Api()
    api.batch["status"], api.runs = "in_progress", 0
    assert found_by(api) == {"batches_lost": 1}
    api = Api()
    api.batch["status"] = "failed"
    assert found_by(api) == {"batches_lost": 1}
    api = Api()
    api.lines.pop()
    api.runs = 2
    assert found_by(api) == {"lines_lost": 1}
    api = Api()
    api.lines.append(api.lines[0])
    assert found_by(api) == {"lines_double": 1}
    api = Api()
    api.lines[1] = _line(1, TEXTS["a"])
    assert found_by(api) == {"lines_wrong": 1}


def test_each_part_that_is_harmed_may_have_so_many_lines_run_again() -> None:
    api = Api()
    api.runs = 3 + 2 * (FLUSH_LINES + ROWS)
    assert found_by(api, harms=2) == Counter()
    api.runs += 1
    assert found_by(api, harms=2) == {"lines_repeated": 1}
