"""Pages of other origins (CORS): what a browser is told, as browsers ask."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from running_gateway import Running

from gateway.config import ConfigError, GatewayConfig, check_config

ORIGIN = "https://app.example"
PREFLIGHT = {
    "origin": ORIGIN,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-lang",
}


def test_no_origin_is_allowed_unless_stated(shared_gateway: Running) -> None:
    reply = shared_gateway.client(None).options("/v1/chat/completions", headers=PREFLIGHT)
    assert reply.status_code == 405
    assert not [name for name in reply.headers if name.startswith("access-control")]


@pytest.mark.parametrize("origins", [(ORIGIN, "http://localhost:3000"), ("*",)])
def test_a_page_may_call_from_a_stated_origin(start: Callable[..., Running], origins: tuple[str, ...]) -> None:
    gateway = start(cors_origins=origins)
    gateway.node()
    allowed = "*" if origins == ("*",) else ORIGIN
    asked = gateway.client(None).options("/v1/chat/completions", headers=PREFLIGHT)
    assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, allowed)
    assert "POST" in asked.headers["access-control-allow-methods"]
    assert "x-stainless-lang" in asked.headers["access-control-allow-headers"]
    client = gateway.client(origin=ORIGIN)
    body = {"model": "stories260K", "prompt": "x", "max_tokens": 1}
    for reply in (
        client.post("/v1/completions", json=body),
        client.post("/v1/completions", json={**body, "stream": True}),
        client.post("/v1/completions", json={**body, "max_tokens": 0}),
        gateway.client(None, origin=ORIGIN).get("/v1/models"),
    ):
        assert reply.headers["access-control-allow-origin"] == allowed, reply.status_code
        assert "x-request-id" in reply.headers["access-control-expose-headers"]
        assert "access-control-allow-credentials" not in reply.headers
    other = gateway.client(None).options("/v1/models", headers={**PREFLIGHT, "origin": "https://evil.example"})
    assert other.headers.get("access-control-allow-origin") == ("*" if allowed == "*" else None)
    plain = gateway.client().post("/v1/completions", json=body)
    assert plain.status_code == 200


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"cors_origins": ("https://app.example/",)}, "'https://app.example/' is not an origin"),
        ({"cors_origins": ("app.example",)}, "expected such as https://app.example"),
        ({"cors_origins": ("https://*.example",)}, "is not an origin"),
        ({"cors_origins": ("null",)}, "is not an origin"),
        ({"cors_origins": ("*",), "auth": "none"}, "'*' needs `auth: keys`"),
    ],
)
def test_settings_that_no_browser_would_match_are_refused(changed: dict[str, object], says: str) -> None:
    config = GatewayConfig(model_dir="m", base_id="b", registry="r", secret_file="s", tmp_dir="t")
    check_config(msgspec.structs.replace(config, cors_origins=("capacitor://localhost", "http://[::1]:3000")))
    with pytest.raises(ConfigError, match="cors_origins: ") as refused:
        check_config(msgspec.structs.replace(config, **changed))
    assert says in str(refused.value)
