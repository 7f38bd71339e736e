"""vLLM's parameters over HTTP on all three routes, against the base model run alone by transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer
from whole_service import MakeService, Service, eventually

from tests.support.peft_reference import PeftReference

BASE = "story"
PROMPT = "Once upon a time"
GREEDY = {"max_tokens": 12, "temperature": 0}
MESSAGES = [{"role": "user", "content": PROMPT}]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def model(copy_with_template: Callable[[str], Path]) -> Path:
    """stories260K with a chat template that says no more than the messages."""
    return copy_with_template(TEMPLATE)


@pytest.fixture(scope="module")
def story(make_service: MakeService, model: Path, stories_adapters: dict[str, Path]) -> Service:
    return make_service(model, {"dragon": {"tenant": "acme", "adapter": str(stories_adapters["dragon"])}}).start()


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model / "tokenizer.json"))


def text_on(http: httpx.Client, route: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    """The text that a route answers with, and its choice (or output)."""
    if route == "invoke":
        reply = http.post(f"/invoke/{BASE}", json={"prompt": PROMPT, **GREEDY, **fields})
        assert reply.status_code == 200, reply.text
        return reply.json()["output"]["text"], reply.json()["output"]
    asked = {"messages": MESSAGES} if route == "chat/completions" else {"prompt": PROMPT}
    reply = http.post(f"/v1/{route}", json={"model": BASE, **asked, **GREEDY, **fields})
    assert reply.status_code == 200, reply.text
    choice = reply.json()["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"], choice


def events_of(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with http.stream("POST", path, json={**body, "stream": True}) as reply:
        assert reply.status_code == 200
        lines = [line[6:] for line in reply.iter_lines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


ROUTES = pytest.mark.parametrize("route", ["invoke", "completions", "chat/completions"])


@ROUTES
def test_how_texts_end(http: httpx.Client, tokenizer: Tokenizer, route: str) -> None:
    plain, _ = text_on(http, route)
    ids = tokenizer.encode(PROMPT + plain).ids[len(tokenizer.encode(PROMPT).ids) :]
    stop = plain[5:9]
    text, choice = text_on(http, route, stop=[stop])
    assert (text, choice["finish_reason"], choice["stop_reason"]) == (plain[: plain.index(stop)], "stop", stop)
    text, choice = text_on(http, route, stop=[stop], include_stop_str_in_output=True)
    assert text == plain[: plain.index(stop) + len(stop)]
    end = ids[3]
    before = tokenizer.decode(tokenizer.encode(PROMPT).ids + ids[: ids.index(end)])[len(PROMPT) :]
    text, choice = text_on(http, route, stop_token_ids=[end])
    assert (text, choice["finish_reason"], choice["stop_reason"]) == (before, "stop", end)
    text, choice = text_on(http, route, stop_token_ids=[end], include_stop_str_in_output=True)
    assert text.startswith(before)
    assert len(text) > len(before)
    text, choice = text_on(http, route, stop=[plain[1:3]], min_tokens=12)
    assert (text, choice["finish_reason"]) == (plain, "length"), "stop strings do not count before min_tokens"
    assert "stop_reason" not in choice


@ROUTES
def test_biases_and_penalties_change_the_text(http: httpx.Client, tokenizer: Tokenizer, route: str) -> None:
    plain, _ = text_on(http, route)
    prompt = tokenizer.encode(PROMPT).ids
    token = tokenizer.encode(PROMPT + plain).ids[len(prompt) + 1]
    repeated = tokenizer.decode(prompt + [token] * 12)[len(PROMPT) :]
    assert text_on(http, route, logit_bias={str(token): 100})[0] == repeated
    assert text_on(http, route, bad_words=[plain.split()[1]])[0].split()[1] != plain.split()[1]
    assert text_on(http, route, repetition_penalty=2.0)[0] != plain
    assert text_on(http, route, repetition_penalty=1.0, logit_bias={}, bad_words=[], min_tokens=0, top_k=-1)[0] == plain
    special = text_on(http, route, logit_bias={"2": 100}, ignore_eos=True, skip_special_tokens=False)[0]
    assert special == "</s>" * 12
    assert text_on(http, route, logit_bias={"2": 100}, ignore_eos=True)[0] == ""


def test_token_ids_are_prompts(http: httpx.Client, client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    prompts = [PROMPT, "One day, Tim"]
    ids = [tokenizer.encode(prompt).ids for prompt in prompts]
    assert text_on(http, "invoke", prompt=ids[0])[0] == text_on(http, "invoke")[0]
    replies = [client.completions.create(model="dragon", prompt=given, n=2, seed=3) for given in (prompts, ids)]
    texts = [[choice.text for choice in reply.choices] for reply in replies]
    assert texts[0] == texts[1]
    assert [choice.index for choice in replies[1].choices] == [0, 1, 2, 3]
    assert replies[1].usage is not None
    assert replies[1].usage.prompt_tokens == len(ids[0]) + len(ids[1])
    alone = client.completions.create(model="dragon", prompt=ids[1], n=1, seed=3)
    assert alone.choices[0].text == texts[1][2], "what is drawn depends on seed, choice and place alone"


def test_prompts_are_truncated_as_transformers_does(http: httpx.Client, model: Path) -> None:
    words = "Once upon a time there was a little girl"
    tokenizer = AutoTokenizer.from_pretrained(model, truncation_side="left")
    for keep in (2, 5, 100):
        ids = tokenizer(words, truncation=True, max_length=keep)["input_ids"]
        want = text_on(http, "invoke", prompt=ids)[0]
        assert text_on(http, "invoke", prompt=words, truncate_prompt_tokens=keep)[0] == want
        assert text_on(http, "completions", prompt=words, truncate_prompt_tokens=keep)[0] == want
    longer = http.post(f"/invoke/{BASE}", json={"prompt": "word " * 900, "truncate_prompt_tokens": -1, **GREEDY}).json()
    assert longer["usage"]["prompt_tokens"] == 512 - 12


def test_choices(client: openai.OpenAI, http: httpx.Client) -> None:
    biased = client.completions.create(model=BASE, prompt=PROMPT, logit_bias={"2": 100}, max_tokens=8)
    assert (biased.choices[0].text, biased.choices[0].finish_reason) == ("", "stop")
    greedy = client.chat.completions.create(model=BASE, messages=MESSAGES, n=3, temperature=0, max_tokens=8)  # type: ignore[arg-type]
    assert len({choice.message.content for choice in greedy.choices}) == 1
    one = http.post(f"/invoke/{BASE}", json={"prompt": PROMPT, "seed": 4, "max_tokens": 8}).json()
    body = {"prompt": PROMPT, "n": 3, "seed": 4, "max_tokens": 8}
    three = http.post(f"/invoke/{BASE}", json=body).json()
    texts = [output["text"] for output in three["outputs"]]
    assert three["output"]["text"] == texts[0] == one["output"]["text"]
    assert len(set(texts)) == 3
    assert three["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert three["usage"]["completion_tokens"] == 24
    *tokens, end = events_of(http, f"/invoke/{BASE}", body)
    streamed = ["".join(token["text"] for token in tokens if token["choice"] == choice) for choice in range(3)]
    assert streamed == texts
    assert [output["finish_reason"] for output in end["outputs"]] == ["length"] * 3
    assert end["usage"] == three["usage"]


def test_metered_once_per_prompt(story: Service, http: httpx.Client) -> None:
    def used() -> int:
        return int(http.get("/usage").json()["total"]["prompt_tokens"])

    before = used()
    asked = {"model": BASE, "prompt": [[1, 403], [1, 403, 407]], "n": 3, "max_tokens": 2}
    reply = http.post("/v1/completions", json=asked).json()
    assert reply["usage"]["prompt_tokens"] == 5
    assert eventually(lambda: used() == before + 5), (before, used())


def scores(model: Path, ids: list[int]) -> list[float]:
    """Log probabilities of all tokens but the first."""
    rows = torch.log_softmax(PeftReference(model).logits(None, ids[:-1], last=len(ids) - 1), dim=-1)
    return [float(row[token]) for row, token in zip(rows, ids[1:], strict=True)]


def test_an_echoed_prompt_has_log_probabilities(client: openai.OpenAI, model: Path, tokenizer: Tokenizer) -> None:
    asked: dict[str, Any] = {"model": BASE, "prompt": PROMPT, "echo": True, "logprobs": 2, **GREEDY}
    choice = client.completions.create(**asked).choices[0]
    assert choice.text.startswith(PROMPT)
    ids = tokenizer.encode(choice.text).ids
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None and logprobs.token_logprobs is not None and logprobs.top_logprobs is not None
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    assert len(logprobs.tokens) == len(ids)
    want = scores(model, ids)
    assert all(abs(got - value) < 1e-3 for got, value in zip(logprobs.token_logprobs[1:], want, strict=True))
    assert all(top is not None and len(top) == 2 for top in logprobs.top_logprobs[1:])
    chunks = [chunk.choices[0] for chunk in client.completions.create(**asked, stream=True)]
    assert "".join(chunk.text for chunk in chunks) == choice.text
    parts = [chunk.logprobs for chunk in chunks if chunk.logprobs is not None]
    assert [token for part in parts for token in part.tokens or []] == logprobs.tokens
    assert [offset for part in parts for offset in part.text_offset or []] == logprobs.text_offset
    assert [value for part in parts for value in part.token_logprobs or []] == logprobs.token_logprobs
    without = client.completions.create(**{**asked, "logprobs": None}).choices[0]
    assert (without.text, without.logprobs) == (choice.text, None)


def test_prompt_logprobs_on_every_route(http: httpx.Client, model: Path, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT).ids
    want = scores(model, ids)
    chat = http.post("/v1/chat/completions", json={"model": BASE, "messages": MESSAGES, "prompt_logprobs": 1}).json()
    for found in (chat["prompt_logprobs"], text_on(http, "completions", prompt_logprobs=1)[1]["prompt_logprobs"]):
        assert found[0] is None
        for token, entry, value in zip(ids[1:], found[1:], want, strict=True):
            own = entry[str(token)]
            assert abs(own["logprob"] - value) < 1e-3
            assert len(entry) == (1 if own["rank"] == 1 else 2)
            assert {other["rank"] for other in entry.values()} == {1, own["rank"]}
    native = text_on(http, "invoke", prompt_logprobs=1)[1]["prompt_logprobs"]
    assert native[0] is None
    assert [entry["token_id"] for entry in native[1:]] == ids[1:]
    first = events_of(http, f"/invoke/{BASE}", {"prompt": PROMPT, **GREEDY, "echo": True, "prompt_logprobs": 1})[0]
    assert (first["text"], first["token_id"], first["prompt_logprobs"]) == (PROMPT, None, native)
    echoed = text_on(http, "invoke", echo=True)
    assert echoed[0].startswith(PROMPT)
    assert "prompt_logprobs" not in echoed[1]


def test_a_caller_that_goes_frees_all_choices(story: Service, http: httpx.Client) -> None:
    body = {"model": BASE, "prompt": [PROMPT, "One day"], "n": 4, "max_tokens": 480, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as reply:
        assert next(reply.iter_lines()).startswith("data: ")
    assert eventually(story.nothing_held), story.node()
