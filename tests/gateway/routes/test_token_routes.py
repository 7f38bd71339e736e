"""/tokenize and /detokenize against transformers' own tokenizers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from running_gateway import Running, start_gateway
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from gateway.calls.prompts import INLINE_CHARACTERS

WORDS = st.sampled_from(["Once", " upon", "\n", "<|im_start|>", "user", "<|im_end|>", "é", "日本", "🏴‍☠️", "  ", "0"])
TEXTS = st.text(max_size=30) | st.lists(WORDS, max_size=12).map("".join)
ROLES = st.sampled_from(["system", "user", "assistant"])


@pytest.fixture(scope="module")
def reference(smollm_dir: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(smollm_dir)


@pytest.fixture(scope="module")
def client(smollm_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Of a gateway over SmolLM2, which no node serves."""
    with ExitStack() as stack:
        yield start_gateway(stack, smollm_dir, tmp_path_factory.mktemp("smollm"), base_id="SmolLM2").client()


@pytest.fixture
def gateway(reused: Running) -> Running:
    return reused


@given(text=TEXTS.filter(bool), special=st.sampled_from([None, True, False]))
@example(text="\x06", special=None)
def test_a_prompt_has_the_tokens_of_transformers(
    client: httpx.Client, reference: PreTrainedTokenizerBase, text: str, special: bool | None
) -> None:
    """A text of characters for which the tokenizer has no tokens is the beginning-of-text token, like an empty one."""
    body = {"prompt": text, "add_special_tokens": special, "return_token_strs": True}
    reply = client.post("/tokenize", json=body)
    expected = reference(text, add_special_tokens=special is not False)["input_ids"] or [reference.bos_token_id]
    assert reply.status_code == 200, reply.text
    assert reply.json() == {
        "count": len(expected),
        "max_model_len": 8192,
        "tokens": expected,
        "token_strs": reference.convert_ids_to_tokens(expected),
    }


@given(turns=st.lists(st.tuples(ROLES, TEXTS), min_size=1, max_size=4), answer=st.sampled_from([None, True, False]))
def test_a_conversation_has_the_tokens_of_transformers(
    client: httpx.Client, reference: PreTrainedTokenizerBase, turns: list[tuple[str, str]], answer: bool | None
) -> None:
    messages = [{"role": role, "content": content} for role, content in turns]
    reply = client.post("/tokenize", json={"model": "SmolLM2", "messages": messages, "add_generation_prompt": answer})
    assert reply.status_code == 200, reply.text
    expected = reference.apply_chat_template(messages, add_generation_prompt=answer is not False, return_dict=False)
    assert reply.json()["tokens"] == expected
    assert reply.json()["token_strs"] is None


@given(turns=st.lists(st.tuples(ROLES, TEXTS), min_size=1, max_size=4), stated=st.sampled_from([None, False]))
def test_a_continued_message_has_the_tokens_of_transformers(
    client: httpx.Client, reference: PreTrainedTokenizerBase, turns: list[tuple[str, str]], stated: bool | None
) -> None:
    messages = [{"role": role, "content": content} for role, content in turns]
    body = {"messages": messages, "add_generation_prompt": stated, "continue_final_message": True}
    reply = client.post("/tokenize", json=body)
    assert reply.status_code == 200, reply.text
    expected = reference.apply_chat_template(messages, continue_final_message=True, return_dict=False)
    assert reply.json()["tokens"] == expected


@given(tokens=st.lists(st.integers(0, 49151), max_size=40))
def test_tokens_have_the_text_of_transformers(
    client: httpx.Client, reference: PreTrainedTokenizerBase, tokens: list[int]
) -> None:
    reply = client.post("/detokenize", json={"tokens": tokens})
    assert (reply.status_code, reply.json()) == (200, {"prompt": reference.decode(tokens)})


def test_long_texts_go_through_a_thread(client: httpx.Client, reference: PreTrainedTokenizerBase) -> None:
    text = "A ship sailed to the sea. " * INLINE_CHARACTERS
    tokens = client.post("/tokenize", json={"prompt": text}).json()["tokens"]
    assert tokens == reference(text)["input_ids"]
    assert client.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": text}


def test_an_empty_prompt_is_what_a_call_makes_of_it(gateway: Running) -> None:
    client = gateway.client()
    tokens = client.post("/tokenize", json={"prompt": ""}).json()["tokens"]
    assert client.post("/invoke/stories260K", json={"prompt": "", "max_tokens": 1}).status_code == 200
    assert tokens == gateway.nodes[0].received[0].token_ids
    assert client.post("/tokenize", json={"prompt": "", "add_special_tokens": False}).json()["tokens"] == []


def test_the_model_is_the_base_or_a_function_of_the_caller(gateway: Running, pirate: dict[str, Any]) -> None:
    acme, other = gateway.client(), gateway.client("other")
    assert acme.post("/deploy/pirate", files=pirate).status_code == 201
    for path, body in (("/tokenize", {"prompt": "Once"}), ("/detokenize", {"tokens": [5]})):
        for model in (None, "stories260K", "pirate", "pirate:latest", "pirate:1"):
            assert acme.post(path, json={**body, "model": model}).status_code == 200
        for client, model in ((acme, "pirate:2"), (acme, "pirate:"), (acme, "nobody"), (other, "pirate")):
            assert client.post(path, json={**body, "model": model}).status_code == 404
        assert gateway.client(None).post(path, json=body).status_code == 401


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"prompt": "a", "continue_final_message": True}, "continue_final_message"),
        ("/tokenize", {"messages": [{"role": "user", "content": "b"}]}, "messages"),  # no chat template
        ("/tokenize", {"prompt": "a", "surprise": 1}, "surprise"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [1, 512]}, "tokens"),  # the vocabulary ends at 511
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
    ],
)
def test_refusals_name_the_field(gateway: Running, path: str, body: dict[str, Any], param: str) -> None:
    reply = gateway.client().post(path, json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (422, param)
