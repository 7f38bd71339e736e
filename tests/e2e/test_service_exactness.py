"""Over HTTP too, every function writes what PEFT writes with that adapter alone."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import torch
from tokenizers import Tokenizer
from whole_service import Service, eventually

from adapters.peft_config import CONFIG_FILE, WEIGHTS_FILE
from tests.support.peft_reference import TIE, PeftReference

PROMPTS = ("Once upon a time", "One day, Tim and his dog")
BASE = "stories260K"


def written(service: Service, function: str, prompt: str) -> tuple[list[int], str]:
    """Token ids of a greedy stream, and the digest it names."""
    asked = {"prompt": prompt, "max_tokens": 40, "temperature": 0, "stream": True}
    with service.client("acme") as http, http.stream("POST", f"/invoke/{function}", json=asked) as reply:
        events = [json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: ")]
    return [event["token_id"] for event in events[:-1] if event["token_id"] is not None], events[-1]["digest"]


def deployed(http: httpx.Client, function: str, directory: Path) -> str:
    """Deploys the adapter and returns its digest."""
    files = {name: (directory / name).read_bytes() for name in (CONFIG_FILE, WEIGHTS_FILE)}
    return str(http.post(f"/deploy/{function}", files=files).raise_for_status().json()["digest"])


def test_all_functions_at_once(service: Service, stories_dir: Path, stories_adapters: dict[str, Path]) -> None:
    """All adapters and the base together, so that batches mix them; each token is PEFT's, but for ties."""
    functions = {f"exact-{name}": path for name, path in stories_adapters.items()}
    jobs = [(function, prompt) for prompt in PROMPTS for function in (*functions, BASE)]
    with service.client("acme") as http:
        digests = {function: deployed(http, function, path) for function, path in functions.items()} | {BASE: None}
        with ThreadPoolExecutor(len(jobs)) as pool:
            answers = list(pool.map(lambda job: written(service, *job), jobs))
        assert eventually(service.nothing_held), service.node()
        for function in functions:
            http.delete(f"/functions/{function}").raise_for_status()

    reference = PeftReference(stories_dir)
    tokenizer = Tokenizer.from_file(str(stories_dir / "tokenizer.json"))
    for (function, prompt), (tokens, digest) in zip(jobs, answers, strict=True):
        assert digest == digests[function]
        ids = tokenizer.encode(prompt).ids
        logits = reference.logits(functions.get(function), ids + tokens[:-1], last=len(tokens))
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert (logits.max(dim=1).values - chosen).max() < TIE, function
