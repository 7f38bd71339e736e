"""The console as a person uses it: a real gateway, a real browser, stub nodes."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import CHROMIUM, Browser, browser
from running_gateway import Running

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium on the path")


def sign_in(page: Browser, gateway: Running, key: str, tenant: str = "") -> None:
    page.open(f"{gateway.url}/console")
    page.fill("#key", gateway.keys[key])
    page.fill("#tenant", tenant)
    page.press("Enter")
    page.until("document.querySelector('h1').textContent === 'Functions'")


def test_deploy_call_and_roll_back(gateway: Running, stories_adapters: dict[str, Path], tmp_path: Path) -> None:
    with browser(tmp_path / "profile") as page:
        sign_in(page, gateway, "acme")
        page.until_text("No functions yet.")
        for version, adapter in enumerate(("pirate", "pirate"), 1):
            page.click("a[href='#/deploy']")
            page.fill("#name", "story")
            files = [stories_adapters[adapter] / name for name in ("adapter_config.json", "adapter_model.safetensors")]
            page.choose_files("#pair", files)
            page.until_text("adapter_config.json (")
            page.click("#deploy")
            page.until_text(f"has version {version}", "#answer")
            break
        page.click("#answer a")
        page.until_text("On no node")
        page.click("#call")
        page.until_text("TTFT", "#call-status")
        assert page.run("document.querySelector('#output').textContent") == " t0 t1 t2 t3 t4 t5 t6 t7"
        assert page.said == []
        print(page.asked)
