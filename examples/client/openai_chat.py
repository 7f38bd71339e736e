"""Stream a chat from a function with the official OpenAI client.

    python examples/client/openai_chat.py http://127.0.0.1:8080 KEY pirate "What is the capital of France?"

`model` is the name of a function (or `name:alias`), or the base model's id.
"""

from __future__ import annotations

import sys

from openai import OpenAI


def main(url: str, key: str, model: str, question: str) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key=key)
    stream = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], max_tokens=64, temperature=0, stream=True
    )
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    main(*sys.argv[1:])
