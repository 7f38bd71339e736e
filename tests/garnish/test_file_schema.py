"""The schema for editors is the committed one, and says of a file what the loader says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from ruamel.yaml import YAML

from garnish.config import load_service_file
from garnish.errors import ServiceFileError
from garnish.file_schema import FILE, document, text

ROOT = Path(__file__).parents[2]
VALIDATOR = Draft202012Validator(document())

WORDS = st.sampled_from(["auto", "none", "keys", "off", "wait", "lru", "x", "./a", "aws", "7", "Prod", "", "${env:X}"])
SIZES = st.sampled_from(["4GiB", "0GiB", "1.5MB", "10", "3 kB", "12XB", "1GB/s", "200MB/s", "15m", "2h", "-1s", "0"])
NUMBERS = st.sampled_from([0, 1, 2, 3, -1, 80, 70000, 20000, 0.5, 1.0, 2.5])
VALUES = WORDS | SIZES | NUMBERS | st.sampled_from([None, True, [], {}, ["x"], {"link": "1GB/s"}, {"bytes": "1GiB"}])

SHAPE: dict[str, Any] = {
    "registry": None,
    "auth": None,
    "gateway": (
        "host", "port", "workers", "secret_file", "redis", "webhook_hosts", "allowed_sources", "node_hosts", "policy",
        "predictor", "hold", "cors_origins",
    ),
    "node": (
        "device", "runner", "dtype", "adapter_memory", "kv_memory", "host_memory", "cpu_workers", "cold_start",
        "eviction", "prefetch", "prefetch_waste", "tensor_parallel", "disk_cache", "simulate",
    ),
    "infra": ("state",),
    "tenants": {"weight", "slo", "limits", "webhook_hosts", "file_bytes"},
    "functions": {"adapter", "alias", "provisioned", "idle_ttl", "prefetch"},
    "node_pools": {"backend", "instance_type", "scale_to_zero_after", "scaling"},
}  # fmt: skip


@st.composite
def files(draw: st.DrawFn) -> dict[str, Any]:
    """A file that is right but for, mostly, one to three fields."""
    found: dict[str, Any] = {"service": "s", "base_model": "./base"}
    for _ in range(draw(st.integers(1, 3))):
        section = draw(st.sampled_from(sorted(SHAPE)))
        fields = SHAPE[section]
        if fields is None or draw(st.integers(0, 9)) == 0:
            found[section] = draw(VALUES)
            continue
        names = [*sorted(fields), "unknown"] if draw(st.booleans()) else sorted(fields)
        entry = {draw(st.sampled_from(names)): draw(VALUES)}
        if isinstance(fields, tuple):
            found[section] = entry
            continue
        needed = {"functions": {"adapter": "./a"}, "node_pools": {"backend": "aws"}}.get(section, {})
        whole = draw(st.sampled_from([{**needed, **entry}, entry, None]))
        found[section] = {draw(st.sampled_from(["a", "a-1", "Bad", "-"])): whole}
    return found


def loads(folder: Path, value: dict[str, Any]) -> bool:
    file = folder / "serverless.yml"
    file.write_text(json.dumps(value))
    try:
        load_service_file(file, {"X": "x"})
    except ServiceFileError:
        return False
    return True


def has_text_of_a_number(value: Any, path: tuple[str, ...] = ()) -> bool:
    """What the loader takes for the sake of environment variables, or replaces by them."""
    if isinstance(value, dict):
        return any(has_text_of_a_number(item, (*path, name)) for name, item in value.items())
    quantity = path and path[-1] in (
        "adapter_memory",
        "kv_memory",
        "host_memory",
        "idle_ttl",
        "scale_to_zero_after",
        "hold",
        "file_bytes",
    )
    return value == "${env:X}" or (value in ("7", "10", "0") and not quantity)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=files())
def test_the_schema_says_what_the_loader_says(tmp_path: Path, value: dict[str, Any]) -> None:
    if not has_text_of_a_number(value):
        errors = [error.message for error in VALIDATOR.iter_errors(value)]
        assert loads(tmp_path, value) == (not errors), (value, errors)


@pytest.mark.parametrize("value", [{"gateway": {"port": "${env:PORT}"}}, {"node": {"adapter_memory": "${env:M}"}}])
def test_variables_stand_for_any_value(value: dict[str, Any]) -> None:
    assert VALIDATOR.is_valid({"service": "s", "base_model": "b", **value})


def test_files_that_are_given_to_users() -> None:
    page = (ROOT / "docs" / "guide" / "serverless-yml.md").read_text()
    examples = [block.partition("```")[0] for block in page.split("```yaml\n")[1:]]
    for example in [(ROOT / "serverless.yml").read_text(), *examples]:
        VALIDATOR.validate(YAML(typ="safe").load(example))


def test_the_committed_schema_is_the_generated_one() -> None:
    assert FILE.read_text() == text(), "run python -m garnish.file_schema"
    Draft202012Validator.check_schema(document())
    header = (ROOT / "serverless.yml").read_text().splitlines()[0]
    assert ROOT / header.partition("$schema=")[2] == FILE
