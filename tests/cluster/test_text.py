"""Tokens of prompts and conversations, against transformers' own."""

from __future__ import annotations

import json
import shutil
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from cluster.text import BaseText, TextError

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n"
    "{% if loop.first and message.role != 'system' %}\n<system>none</system>\n{% endif %}\n"
    "<{{ message['role'] }}>{{ message['content'] | trim }}</{{ message['role'] }}>\n"
    "{% if message.content == 'stop' %}{% break %}{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}{{ {'a': '<é>'} | tojson }}"
)


@pytest.fixture(scope="session")
def chatty_dir(stories_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("chatty") / "model"
    shutil.copytree(stories_dir, target)
    (target / "chat_template.jinja").write_text(TEMPLATE)
    return target


MESSAGES = [
    {"role": "user", "content": " Héllo & <b> "},
    {"role": "assistant", "content": "stop"},
    {"role": "user", "content": "never seen"},
]


def test_chat_as_transformers_has_it(chatty_dir: Path) -> None:
    reference = AutoTokenizer.from_pretrained(chatty_dir)
    expected = reference.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert BaseText(chatty_dir).encode_chat(MESSAGES) == expected


@pytest.fixture(scope="session")
def both(stories_dir: Path) -> tuple[BaseText, Any]:
    """Our tokenizer and transformers' of the same files."""
    return BaseText(stories_dir), AutoTokenizer.from_pretrained(stories_dir)


@given(prompt=st.text(min_size=1, max_size=60))
def test_prompts_as_transformers_has_them(both: tuple[BaseText, Any], prompt: str) -> None:
    text, reference = both
    assert text.encode_prompt(prompt) == reference(prompt)["input_ids"]


def test_empty_prompt_is_bos(stories_dir: Path) -> None:
    text = BaseText(stories_dir)
    assert text.encode_prompt("") == [text.bos_id] == [1]


def test_refusals(stories_dir: Path, chatty_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(TextError, match="no chat template"):
        BaseText(stories_dir).encode_chat(MESSAGES)
    for source in (
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages[99].role.x }}",
    ):
        broken = tmp_path / "broken"
        shutil.copytree(chatty_dir, broken, dirs_exist_ok=True)
        (broken / "chat_template.jinja").write_text(source)
        with pytest.raises(TextError, match="refused"):
            BaseText(broken).encode_chat(MESSAGES)


def test_named_templates_and_end_tokens(stories_dir: Path, tmp_path: Path) -> None:
    target = tmp_path / "model"
    shutil.copytree(stories_dir, target)
    file = target / "tokenizer_config.json"
    settings_ = json.loads(file.read_bytes())
    settings_["chat_template"] = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "{{ messages[0].content }}"},
    ]
    file.write_text(json.dumps(settings_))
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    text = BaseText(target)
    assert text.encode_chat([{"role": "user", "content": "Once"}]) == text.encode_prompt("Once")[1:]
    assert {2, 7} <= text.eos_ids


@pytest.mark.parametrize("expression", ["messages[0].content + 1", "messages['x'].y.z", "1 // 0", "messages[9].a.b"])
def test_a_template_that_breaks_is_a_refusal(stories_dir: Path, tmp_path: Path, expression: str) -> None:
    directory = tmp_path / "broken"
    shutil.copytree(stories_dir, directory)
    (directory / "chat_template.jinja").write_text("{{ " + expression + " }}")
    with pytest.raises(TextError, match="chat template refused"):
        BaseText(directory).encode_chat([{"role": "user", "content": "hello"}])


def bad_words_of_vllm(tokenizer: Any, words: list[str]) -> list[list[int]]:
    """As vLLM's SamplingParams.update_from_tokenizer makes them, by transformers' tokenizer."""
    found: list[list[int]] = []
    for word in words:
        for spaced in (False, True):
            ids = tokenizer.encode((" " if spaced else "") + word.lstrip(), add_special_tokens=False)
            if not spaced or (ids[0] != found[-1][0] and len(ids) == len(found[-1])):
                found.append(ids)
    return found


@given(words=st.lists(st.text(min_size=1, max_size=12).filter(str.strip), max_size=4))
def test_bad_words_as_vllm_has_them(both: tuple[BaseText, Any], words: list[str]) -> None:
    text, reference = both
    assert text.encode_bad_words(words) == bad_words_of_vllm(reference, words)


def test_bad_words_of_a_byte_level_tokenizer(smollm_dir: Path) -> None:
    reference, words = AutoTokenizer.from_pretrained(smollm_dir), ["Paris", " the", "new line", "\u20ac"]
    found = BaseText(smollm_dir).encode_bad_words(words)
    assert found == bad_words_of_vllm(reference, words)
    assert len(found) > len(words), "words have another token behind a space"


@given(prompt=st.text(min_size=1, max_size=40), keep=st.integers(2, 20))
def test_prompts_are_truncated_as_transformers_does(
    both: tuple[BaseText, Any], stories_dir: Path, prompt: str, keep: int
) -> None:
    reference = _left_truncating(stories_dir)
    assert both[0].encode_prompt(prompt, keep=keep) == reference(prompt, truncation=True, max_length=keep)["input_ids"]


@lru_cache
def _left_truncating(directory: Path) -> Any:
    return AutoTokenizer.from_pretrained(directory, truncation_side="left")


@given(prompt=st.text("ab \u00e9\u20ac\U0001f600\n", min_size=1, max_size=60))
def test_offsets_of_tokens_are_the_lengths_of_the_texts_before(
    both: tuple[BaseText, Any], smollm_dir: Path, prompt: str
) -> None:
    """Of a tokenizer of words and bytes, and of a byte-level one. A part of a character has no text yet."""
    for text in (both[0], _of(smollm_dir)):
        ids = text.encode_prompt(prompt)
        expected = [0]
        for end in range(1, len(ids)):
            before = text.tokenizer.decode(ids[:end], skip_special_tokens=True)
            expected.append(expected[-1] if before.endswith("\ufffd") else len(before))
        whole = text.tokenizer.decode(ids, skip_special_tokens=True)
        assert text.token_offsets(ids, whole, skip_special=True) == expected


@lru_cache
def _of(directory: Path) -> BaseText:
    return BaseText(directory)
