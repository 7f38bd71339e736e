"""LightLLM behind the command line, the gateway and the real engine, in Triton's interpreter: PEFT's tokens."""

from __future__ import annotations

import importlib.util
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from whole_service import MakeService, Service, eventually

from tests.support.peft_reference import PeftReference, make_adapter
from tests.support.random_model import HALF_TOLERANCE, write_half_llama

if importlib.util.find_spec("lightllm") is None:
    pytest.skip("lightllm is not installed (make install-dev): its runner is NOT tested", allow_module_level=True)

PROMPT, TOKENS = "Once upon a time", 3
QKV = ["q_proj", "k_proj", "v_proj"]
"""What the papers' adapters adapt."""


@pytest.fixture(scope="module")
def half_llama(stories_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the tokenizer of stories260K."""
    target = write_half_llama(tmp_path_factory.mktemp("half") / "llama", 512)
    for file in stories_dir.glob("token*"):
        shutil.copy(file, target)
    return target


def with_lightllm(service: Service, **node: Any) -> Service:
    """The interpreter computes a token in a second: what a start would measure is left out."""
    file = service.folder / "serverless.yml"
    written = json.loads(file.read_text())
    written["node"] |= {"runner": "lightllm", "cold_start": "wait", "cpu_workers": 0, **node}
    file.write_text(json.dumps(written))
    return service


def written(service: Service, function: str) -> list[int]:
    asked = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "stream": True, "ignore_eos": True}
    with service.client("acme") as http, http.stream("POST", f"/invoke/{function}", json=asked) as reply:
        events = [json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: ")]
    return [event["token_id"] for event in events[:-1] if event["token_id"] is not None]


@pytest.mark.skipif(torch.cuda.is_available(), reason="benchmarks.gpu.suite --runner lightllm is the GPU's test")
def test_tokens_are_pefts(make_service: MakeService, half_llama: Path, tmp_path: Path) -> None:
    """Two adapters of different ranks and the base at once, by the padded kernel."""
    paths: dict[str, Path | None] = {
        name: make_adapter(half_llama, tmp_path / name, rank, torch.float16, r=rank, target_modules=QKV)
        for name, rank in (("low", 3), ("high", 8))
    }
    declared = {name: {"tenant": "acme", "adapter": str(path)} for name, path in paths.items()}
    service = with_lightllm(make_service(half_llama, declared, dtype="auto"), lora_kernel="bgmv").start()
    with service.client() as http:
        assert http.get("/readyz").status_code == 200
    functions = [*paths, service.ready["base_model"]]
    with ThreadPoolExecutor(len(functions)) as pool:
        answers = list(pool.map(lambda function: written(service, function), functions))
    assert eventually(service.nothing_held), service.node()
    assert service.node()["adapter_itemsize"] == 2, "the model's own dtype"
    assert service.stop() == 0
    assert len({tuple(tokens) for tokens in answers}) == 3, "the adapters change nothing"

    reference, ids = (
        PeftReference(half_llama),
        Tokenizer.from_file(str(half_llama / "tokenizer.json")).encode(PROMPT).ids,
    )
    for function, tokens in zip(functions, answers, strict=True):
        assert len(tokens) == TOKENS
        logits = reference.logits(paths.get(function), ids + tokens[:-1], last=TOKENS)
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert float((logits.max(dim=1).values - chosen).max()) < 2 * HALF_TOLERANCE, function
