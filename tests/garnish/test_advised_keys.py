"""The loader takes every `key: value` that a message of the product or a page recommends for serverless.yml.

They are found without help: in the pages code spans `key: value`, dotted keys and YAML blocks; in string literals of
the product `...; key: value`, `set key to value`, and what follows `use` or `set` in `key: problem; use value`. A key
is tried in every section that has one of its name.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from garnish.config import load_service_file
from garnish.errors import ServiceFileError
from garnish.file_schema import document
from tests.lint.pages import pages

ROOT = Path(__file__).parents[2]
PRODUCT = ("adapters", "cluster", "garnish", "gateway", "infra", "kernels", "node_agent")
Place = tuple[str, ...]
"""The keys from the file's top down."""

EXCEPTED = {
    # Fields of requests, replies, events and tokenizers; a command; a file.
    "best_of: 1", "circuit: closed", "event: error", 'finish_reason: "timeout"', "max_tokens: 0", "n: 1", "n: 2",
    "n: 4", "pre: smollm", "prompt_logprobs: k", "temperature: null", "token_id: null", "tools: []", "run: chmod",
    "none: show", "gateway.json",
    # What a page has its reader build.
    "registry: shm://name", "gateway.policy: last_row", "node.queue_limit",
    # What a page says is refused.
    "package: garnish==0.1.0",
}  # fmt: skip

KEY, VALUE = r"[a-z_][a-z0-9_.]*", r"(?:\{[^{}…]*\}|\[[^\[\]…]*\]|[^\s{}\[\],;:<>…\0]+(?::[^\s,;]+)?)"
SPAN = re.compile(rf"({KEY}): ({VALUE})")
DOTTED = re.compile(r"(?:gateway|node|tenants|functions|node_pools|infra|prices)(?:\.(?:[a-z_]+|NAME|\*))+")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
WRITTEN = re.compile(r"^<!-- ([\w: -]+) -->.*?^<!-- /\1 -->", re.DOTALL | re.MULTILINE)

WORD = r"[a-z0-9_]+"
HOLE = "\0"
"""Stands for what a message fills in."""
AFTER_CLAUSE = re.compile(rf"(?:; |\b(?:set|use|say) )({KEY}): ({VALUE})(?![\w{HOLE}])")
SET_TO = re.compile(rf"\bset ({KEY}) to ({WORD})")
PREFIX = re.compile(rf"({KEY}): .*; (?:use|set) ((?:{WORD}(?:, | or |$))+)$")
NO_VALUES = {"less", "lower", "more"}

CONTEXT: dict[str, Any] = {
    "service": "s",
    "base_model": "./base",
    "functions": {"NAME": {"adapter": "./adapter"}},
    "node_pools": {"NAME": {"backend": "local", "max": 9}},
    "infra": {
        "aws": {
            "region": "eu-central-1", "vpc_id": "vpc-0a1b2c3d", "subnet_ids": ["subnet-0a1b2c3d"],
            "gateway_security_group_id": "sg-0a1b2c3d", "secret_parameter": "/a/secret",
            "package": "s3://bucket/garnish-0.1.0-py3-none-any.whl", "image_parameter": "/a/image",
            "model_source": "s3://bucket/model",
        }
    },
}  # fmt: skip
"""What the file has to say beside a piece, where it is about such a section."""


class AnyVariable(dict[str, str]):
    def __missing__(self, name: str) -> str:
        return "1"


@cache
def places() -> frozenset[Place]:
    """Every key that the file may have, with NAME for a name that its writer chooses."""
    whole = document()

    def below(schema: dict[str, Any], place: Place) -> Iterator[Place]:
        if "$ref" in schema:
            schema = whole["$defs"][schema["$ref"].rpartition("/")[2]]
        for option in schema.get("anyOf", ()):
            yield from below(option, place)
        fields = dict(schema.get("properties", {}))
        if isinstance(named := schema.get("additionalProperties"), dict):
            fields["NAME"] = named
        for name, field in fields.items():
            yield (*place, name)
            yield from below(field, (*place, name))

    return frozenset(below(whole, ()))


def candidates(key: str) -> list[Place]:
    """The places that a key, written with its section or without, may mean."""
    written = tuple("NAME" if part == "*" else part for part in key.split("."))
    return sorted(place for place in places() if place[-len(written) :] == written)


def problem_of(key: str, value: str, folder: Path) -> str | None:
    """Returns None if the loader takes the piece in one of the sections that know its key."""
    found = candidates(key)
    problems = [
        load_problem(file_text(place, "1" if re.fullmatch("[A-Z]", value) else value), folder) for place in found
    ]
    if not found:
        return f"serverless.yml has no key {key}"
    return None if None in problems else f"{key}: {value}: {problems[0]}"


def file_text(place: Place, value: str) -> str:
    """A file that says no more than it must, and the piece as it is written."""
    top: dict[str, Any] = {name: CONTEXT[name] for name in ("service", "base_model")}
    holder, known = top, CONTEXT
    for name in place[:-1]:
        known = known.get(name, {})
        holder[name] = {key: each for key, each in known.items() if not isinstance(each, dict)}
        holder = holder[name]
    holder[place[-1]] = HOLE
    return json.dumps(top).replace(json.dumps(HOLE), value).replace('"NAME"', '"name"')


def load_problem(text: str, folder: Path) -> str | None:
    file = folder / "serverless.yml"
    file.write_text(text)
    try:
        load_service_file(file, AnyVariable())
    except ServiceFileError as error:
        return str(error)
    return None


def spans(page: Path) -> Iterator[str]:
    """The code spans of a page's own text."""
    text = WRITTEN.sub("", FENCE.sub("", page.read_text()))
    return (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text))


def page_pieces() -> Iterator[tuple[str, str, str]]:
    for page in pages():
        for span in spans(page):
            if piece := SPAN.fullmatch(span):
                yield str(page.relative_to(ROOT)), piece[1], piece[2]


def page_keys() -> Iterator[tuple[str, str]]:
    for page in pages():
        yield from ((str(page.relative_to(ROOT)), span) for span in spans(page) if DOTTED.fullmatch(span))


def page_files() -> Iterator[tuple[str, str]]:
    """The YAML blocks of the pages; one that states a key twice shows lines to choose from."""
    for page in pages():
        for language, block in FENCE.findall(page.read_text()):
            keys = re.findall(r"^(\w+):", block, re.MULTILINE)
            if language == "yaml":
                for text in block.splitlines() if len(set(keys)) < len(keys) else [block]:
                    missing = [f"{name}: x\n" for name in ("service", "base_model") if f"{name}:" not in text]
                    yield str(page.relative_to(ROOT)), "".join(missing) + text


def messages(text: str) -> Iterator[tuple[int, str]]:
    """Line and text of every string literal of a module but its docstrings."""
    tree, apart = ast.parse(text), set[int]()
    for node in ast.walk(tree):  # what holds a literal comes before it
        if isinstance(node, ast.Expr):
            apart.add(id(node.value))
        elif isinstance(node, ast.JoinedStr):
            apart |= {id(part) for part in node.values}
            parts = [part.value if isinstance(part, ast.Constant) else HOLE for part in node.values]
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in apart:
            yield node.lineno, node.value


def advised(message: str) -> Iterator[tuple[str, str]]:
    """The keys and values that a message recommends."""
    for found in (*AFTER_CLAUSE.finditer(message), *SET_TO.finditer(message)):
        yield found[1], found[2]
    if found := PREFIX.fullmatch(message):
        yield from ((found[1], value) for value in re.findall(WORD, found[2]) if value not in {"or", *NO_VALUES})


@cache
def product_messages() -> list[tuple[str, str]]:
    """File and line of each string literal of the product, and the literal."""
    files = [file for folder in PRODUCT for file in sorted((ROOT / folder).rglob("*.py"))]
    return [(f"{file.relative_to(ROOT)}:{line}", text) for file in files for line, text in messages(file.read_text())]


def product_pieces() -> Iterator[tuple[str, str, str]]:
    for where, message in product_messages():
        for key, value in advised(message):
            yield where, key, value


def product_keys() -> Iterator[tuple[str, str]]:
    """The dotted keys in messages of several words."""
    for where, message in product_messages():
        for key in re.findall(rf"(?<![\w./]){DOTTED.pattern}(?![\w/(])", message) if " " in message else ():
            yield where, key


def wanted(found: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Those that are not excepted."""
    return [each for each in found if ": ".join(each[1:]) not in EXCEPTED]


@pytest.mark.parametrize(("where", "key", "value"), wanted([*page_pieces(), *product_pieces()]))
def test_an_advised_value_is_taken(tmp_path: Path, where: str, key: str, value: str) -> None:
    assert problem_of(key, value, tmp_path) is None, where


@pytest.mark.parametrize(("where", "key"), wanted([*page_keys(), *product_keys()]))
def test_a_named_key_is_there(where: str, key: str) -> None:
    assert candidates(key), f"{where}: serverless.yml has no key {key}"


@pytest.mark.parametrize(("where", "text"), list(page_files()))
def test_a_file_of_a_page_is_taken(tmp_path: Path, where: str, text: str) -> None:
    assert load_problem(text, tmp_path) is None, where


def test_every_exception_is_still_needed() -> None:
    found = {f"{key}: {value}" for _, key, value in (*page_pieces(), *product_pieces())}
    assert found | {key for _, key in page_keys()} >= EXCEPTED


@pytest.mark.parametrize(("message", "found"), [
    ("the engine has all cores; threads: N leaves the others", [("threads", "N")]),
    ("cpu_workers: nobody answers; set cpu_workers to 0", [("cpu_workers", "0")]),
    ("device: \0 is unknown; use auto, cpu or cuda", [("device", "auto"), ("device", "cpu"), ("device", "cuda")]),
    ("runner: \0 is unknown; use \0", []),
    ("host_memory: 3 bytes can't be reserved; set less", []),
    ("it is not served: it replaces parts of the base", []),
])  # fmt: skip
def test_advice_is_found_in_a_message(message: str, found: list[tuple[str, str]]) -> None:
    assert list(advised(message)) == found


@pytest.mark.parametrize(("key", "value", "problem"), [
    ("cpu_workers", "0", None),
    ("node.simulate.link", "20MB/s", None),
    ("limits", "{concurrent: 64}", None),
    ("threads", "N", "no key threads"),
    ("node.threads", "2", "no key node.threads"),
    ("cpu_workers", "some", "cpu_workers"),
    ("link", "fast", "expected a rate"),
])  # fmt: skip
def test_what_the_loader_says_of_a_piece(tmp_path: Path, key: str, value: str, problem: str | None) -> None:
    found = problem_of(key, value, tmp_path)
    assert found is None if problem is None else found is not None and problem in found
