"""`garnish webhook-secrets` against a real gateway: secrets are made, listed without their text, and end."""

from __future__ import annotations

import json

import pytest
from running_gateway import Running

from garnish.cli.main import main


def test_creates_lists_and_deletes(
    gateway: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GARNISH_URL", gateway.url)
    monkeypatch.setenv("GARNISH_API_KEY", gateway.keys["admin"])

    def garnish(*arguments: str) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["webhook-secrets", *arguments])
        return ended.value.code, *capsys.readouterr()

    code, out, err = garnish("create", "acme")
    assert (code, out[:6]) == (0, "whsec_"), err
    made = json.loads(garnish("create", "acme", "--json")[1])
    assert made["secret_id"] not in err
    code, _, err = garnish("create", "acme")
    assert (code, "end one first" in err) == (1, True)
    code, listed, _ = garnish("list", "acme")
    assert code == 0
    assert made["secret_id"] in listed
    assert "whsec_" not in listed
    first, second = json.loads(garnish("list", "acme", "--json")[1])["secrets"]
    assert (second["secret_id"], sorted(second)) == (made["secret_id"], ["created", "secret_id"])
    assert garnish("delete", "acme", first["secret_id"])[0] == 0
    assert [each["secret_id"] for each in json.loads(garnish("list", "acme", "--json")[1])["secrets"]] == [
        made["secret_id"]
    ]
    assert garnish("delete", "acme", first["secret_id"])[0] == 1
    assert garnish("list", "nobody")[0] == 1
    monkeypatch.setenv("GARNISH_API_KEY", gateway.keys["acme"])
    code, _, err = garnish("list", "acme")
    assert (code, "whsec_" in err) == (1, False), "a tenant's own key may not"
