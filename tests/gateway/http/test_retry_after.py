"""Each 429, 502, 503 and 507 says when to try again, wherever such an error is made."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.errors import RETRIED, STATUS, ServiceError
from gateway.http.errors import error_reply
from node_agent.api.app import error_response

ROOT = Path(__file__).parents[3]
PACKAGES = ("cluster", "gateway", "node_agent")
MAKERS = {
    "cluster/http_protocol.py": "_refuse",  # invalid requests, and those for which no descriptors are left
    "gateway/http/errors.py": "error_reply",
    "node_agent/api/app.py": "error_response",
}
"""Functions that make a reply's status from an error's: all others leave that to them."""
OTHERS = {("gateway/http/errors.py", "openai_status"), ("gateway/http/protocol.py", "refusal")}
"""Functions that read the status for `error_reply`, or to count it."""


@pytest.mark.parametrize("kind", STATUS)
@pytest.mark.parametrize("after", [None, 0.0, 0.2, 7.3])
def test_replies_to_errors_that_pass_have_a_retry_after(kind: str, after: float | None) -> None:
    error, passes = ServiceError(kind, "x", retry_after=after), STATUS[kind] in (429, 502, 503, 507)
    stated = {None: "1", 0.0: "1", 0.2: "1", 7.3: "8"}[after] if passes else None
    for path in ("/invoke/f", "/v1/chat/completions"):
        assert error_reply(error, path, "req_1")[2].get("retry-after") == stated
    assert error_response(error).headers.get("retry-after") == stated


def test_the_statuses_of_errors_are_read_only_where_retry_after_is_added() -> None:
    """So no other place can answer with such an error's status."""
    makers = {(path, name) for path, name, node in nodes() if isinstance(node, ast.Attribute) and reads_status(node)}
    assert makers == MAKERS.items() | OTHERS


def test_no_reply_states_such_a_status_itself() -> None:
    stated = [
        f"{path}:{node.lineno}"
        for path, _, node in nodes()
        if isinstance(node, ast.Call)
        for value in [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg == "status_code")]
        if isinstance(value, ast.Constant) and value.value in RETRIED and "esponse" in ast.unparse(node.func)
    ]
    assert not stated


def reads_status(node: ast.Attribute) -> bool:
    """Whether the expression is `error.status`."""
    return node.attr == "status" and isinstance(node.value, ast.Name) and node.value.id == "error"


def nodes() -> Iterator[tuple[str, str, ast.AST]]:
    """Yields the file, the innermost function and the node of each expression of the servers."""
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            path = str(file.relative_to(ROOT))
            yield from ((path, name, node) for name, node in below("", ast.parse(file.read_text())))


def below(name: str, node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    for child in ast.iter_child_nodes(node):
        inner = child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else name
        yield inner, child
        yield from below(inner, child)
