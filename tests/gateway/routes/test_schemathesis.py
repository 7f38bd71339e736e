"""Schemathesis over the committed openapi.json against a running gateway: an independent reading of the contract."""

from __future__ import annotations

import json

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from running_gateway import Running
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from gateway.routes.openapi import FILE
from tests.support.draws import draws

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
"""Whether invalid data is refused and valid data accepted depends on more than a schema can say."""


DOCUMENT = json.loads(FILE.read_text())
SCHEMA = schemathesis.openapi.from_dict(DOCUMENT)
OPERATIONS = [(method, path) for path, item in DOCUMENT["paths"].items() for method in item]


@pytest.mark.hypothesis
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_answers_conform(deployed: Running, method: str, path: str) -> None:
    @settings(max_examples=draws(12), suppress_health_check=list(HealthCheck))
    @given(case=SCHEMA[path][method.upper()].as_strategy())
    def check(case: schemathesis.Case) -> None:
        streams = isinstance(case.body, dict) and case.body.get("stream") is True
        headers = {"authorization": f"Bearer {deployed.keys['acme']}"}
        response = case.call(base_url=deployed.url, headers=headers, timeout=60)
        case.validate_response(response, checks=CHECKS[:2] if streams else CHECKS)

    check()
