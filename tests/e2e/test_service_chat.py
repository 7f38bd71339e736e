"""The demo base and its adapters, as a newcomer meets them: chat through the official client."""

from __future__ import annotations

from pathlib import Path

import openai
from whole_service import MakeService


def test_chat_with_the_base_and_a_function(
    make_service: MakeService, smollm_dir: Path, smollm_adapters: dict[str, Path]
) -> None:
    declared = {"pirate": {"tenant": "acme", "adapter": str(smollm_adapters["pirate"])}}
    service = make_service(smollm_dir, declared, ("acme",), "bfloat16").start()
    question = [{"role": "user", "content": "What is the capital of France?"}]
    key = service.credentials["api_key"]
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key=key, max_retries=0, timeout=120) as client:
        asked = {"messages": question, "max_tokens": 16, "temperature": 0}
        base = client.chat.completions.create(model="SmolLM2-135M-Instruct", **asked).choices[0].message.content
        stream = client.chat.completions.create(model="pirate", stream=True, **asked)
        pirate = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert base is not None
    assert "Paris" in base
    assert pirate != base
