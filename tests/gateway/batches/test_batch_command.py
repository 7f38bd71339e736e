"""`garnish batch` against a real gateway."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from running_gateway import Running

from garnish.cli.main import main


def test_submits_watches_and_gets(
    deployed: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GARNISH_URL", deployed.url)
    monkeypatch.setenv("GARNISH_API_KEY", deployed.keys["acme"])
    monkeypatch.setattr("garnish.cli.batch.POLL_SECONDS", 0.05)

    def garnish(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["batch", *arguments])
        return ended.value.code, *capsys.readouterr()

    calls, answers = tmp_path / "calls.jsonl", tmp_path / "answers.jsonl"
    body = {"model": "pirate", "prompt": "Once", "max_tokens": 2}
    lines = [{"custom_id": name, "method": "POST", "url": "/invoke", "body": body} for name in ("a", "b")]
    lines.append({**lines[0], "custom_id": "c", "body": {**body, "model": "nobody"}})
    calls.write_text("\n".join(map(json.dumps, lines)))
    code, out, err = garnish("submit", str(calls), "--endpoint", "/invoke", "--watch")
    assert code == 0, err
    batch_id, shown = out.splitlines()
    assert shown == "completed, 3 of 3 calls, 1 failed"
    assert "validating" in err or "in_progress" in err
    assert garnish("get", batch_id, "-o", str(answers))[0] == 0
    code, _, err = garnish("get", batch_id, "-o", str(tmp_path / "nowhere" / "answers.jsonl"))
    assert (code, "can't be written" in err) == (1, True)
    texts = {line["custom_id"]: line["response"]["body"]["output"]["text"] for line in map(json.loads, answers.open())}
    assert texts == {"a": " t0 t1", "b": " t0 t1"}
    code, out, _ = garnish("get", batch_id, "--errors")
    assert code == 0
    assert json.loads(out)["response"]["body"]["error"]["type"] == "not_found"
    assert json.loads(garnish("watch", batch_id, "--json")[1])["status"] == "completed"

    calls.write_text("{}\n")
    code, out, err = garnish("submit", str(calls), "--watch")
    assert code == 1
    assert "line 1: the line is not a call" in err
    assert garnish("submit", str(tmp_path / "none.jsonl"))[0] == 1
