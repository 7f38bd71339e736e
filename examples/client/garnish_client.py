"""Deploy, call, stream and delete an adapter with Garnish's own client.

    python examples/client/garnish_client.py                    (beside a running `make up`)

Without arguments the client takes GARNISH_URL and GARNISH_API_KEY, or what `garnish up` left in ./.garnish.
"""

from __future__ import annotations

from pathlib import Path

import garnish

ADAPTER = Path(__file__).parents[1] / "adapters" / "SmolLM2-135M-Instruct" / "pirate"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def main() -> None:
    with garnish.Client() as client:
        deployed = client.deploy("client-pirate", ADAPTER)
        print(f"{deployed.function} version {deployed.version}")

        reply = client.invoke("client-pirate", QUESTION, max_tokens=48, temperature=0)
        print(reply.output.text)

        for event in client.invoke("client-pirate", QUESTION, stream=True, max_tokens=48, temperature=0):
            print(getattr(event, "text", "\n"), end="", flush=True)

        client.delete("client-pirate")


if __name__ == "__main__":
    main()
