"""Other projects' load generators, unchanged, against `garnish up` with each engine: `vllm bench serve` over eight
functions; guidellm.

Each is installed into a separate environment (5 GB in all, kept for the next run). vLLM's is also the node's with
`engine: vllm`. A failed request fails the run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common.http_service import HttpService
from benchmarks.common.report import ROOT, arguments, publish, report
from tests.support.environments import FOLDER, LOAD_GENERATORS, PINS, install

MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
ADAPTERS = sorted((ROOT / "examples" / "adapters" / MODEL.name).glob("*/"))
FUNCTIONS = [f"a{number}" for number in range(8)]
ENGINES = ("garnish", "vllm")
REQUESTS, CONCURRENCY, PROMPT_TOKENS, OUTPUT_TOKENS = 16, 4, 32, 8
RUN_SECONDS = 900


class Outcome(NamedTuple):
    """Counts of a load generator, and the tables that it printed."""

    completed: int
    failed: int
    output: str


class Run(NamedTuple):
    service_url: str
    key: str
    folder: Path
    scratch: Path

    def call(self, *command: str) -> str:
        """Runs a program of the environment; what it printed. Raises CalledProcessError, TimeoutExpired."""
        program = [str(self.folder / "bin" / command[0]), *command[1:]]
        environment = {
            "OPENAI_API_KEY": self.key,
            "HF_HUB_OFFLINE": "1",
            "NO_COLOR": "1",
            "COLUMNS": "100",
            "PYTHONPATH": "",
        }
        done = subprocess.run(
            program,
            env={**os.environ, **environment},
            cwd=self.scratch,
            capture_output=True,
            text=True,
            timeout=RUN_SECONDS,
        )
        if done.returncode:
            print(done.stdout[-3000:], done.stderr[-3000:], file=sys.stderr)
        done.check_returncode()
        return done.stdout


def vllm(run: Run, backend: str, endpoint: str) -> Outcome:
    file = run.scratch / f"{backend}.json"
    output = run.call(
        "vllm", "bench", "serve", "--backend", backend, "--endpoint", endpoint, "--base-url", run.service_url,
        "--model", MODEL.name, "--tokenizer", str(MODEL), "--lora-modules", *FUNCTIONS,
        "--lora-assignment", "round-robin", "--dataset-name", "random",
        "--random-input-len", str(PROMPT_TOKENS), "--random-output-len", str(OUTPUT_TOKENS),
        "--num-prompts", str(REQUESTS), "--max-concurrency", str(CONCURRENCY), "--disable-tqdm",
        "--save-result", "--result-filename", str(file),
    )  # fmt: skip
    result = json.loads(file.read_text())
    return Outcome(result["completed"], result["failed"], output[output.index("============ Serving") :].strip())


def guidellm(run: Run, request_format: str) -> Outcome:
    file = run.scratch / "guidellm.json"
    backend = f"kind=openai_http,target={run.service_url},api_key={run.key},model={FUNCTIONS[0]}"
    output = run.call(
        "guidellm", "run", "--backend", f"{backend},request_format={request_format}",
        "--tokenizer", f"kind=huggingface_auto,model={MODEL}",
        "--profile", f"kind=concurrent,streams={CONCURRENCY}", "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}",
        "--output", "kind=console", "--output", f"kind=json,path={file}", "--disable-console-interactive",
    )  # fmt: skip
    totals = json.loads(file.read_text())["benchmarks"][0]["metrics"]["request_totals"]
    summary = output[output.index("Run Summary Info") : output.index("✔ Benchmarking complete")].strip()
    return Outcome(totals["successful"], totals["errored"] + totals["incomplete"], summary)


CLIENTS: dict[str, tuple[str, Callable[[Run], Outcome]]] = {
    "vllm-completions": ("vllm", lambda run: vllm(run, "openai", "/v1/completions")),
    "vllm-chat": ("vllm", lambda run: vllm(run, "openai-chat", "/v1/chat/completions")),
    "guidellm-chat": ("guidellm", lambda run: guidellm(run, "/v1/chat/completions")),
    "guidellm-completions": ("guidellm", lambda run: guidellm(run, "/v1/completions")),
}


@contextmanager
def recorded(url: str, file: Path | None) -> Iterator[str]:
    """The address to call: the service's own, or that of a proxy that writes the requests to `file`."""
    if file is None:
        yield url
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("")
    command = [sys.executable, "-m", "benchmarks.clients.recorder", url, str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as proxy:
        assert proxy.stdout is not None
        yield proxy.stdout.readline().strip()
        proxy.terminate()


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--environments", type=Path, default=FOLDER, metavar="DIR")
    parser.add_argument("--record", type=Path, metavar="DIR", help="write each client's requests to DIR/CLIENT.jsonl")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    options = parser.parse_args()
    for name in LOAD_GENERATORS:
        install(name, options.environments.absolute() / name)
    environments: Path = options.environments.absolute()
    rows = [row for engine in options.engines for row in measure(engine, environments, options.record)]
    settings = {
        "pins": list(dict.fromkeys(pin for name in LOAD_GENERATORS for pin in PINS[name])),
        "engines": options.engines,
        "functions": len(FUNCTIONS),
        "requests": REQUESTS,
        "concurrency": CONCURRENCY,
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
    }
    figures = {
        f"{row['engine']}_{row['client']}_{kind}": float(row[kind]) for row in rows for kind in ("completed", "failed")
    }
    publish(report("foreign_clients", settings, options.seed, rows, figures), options.json)
    if any(row["failed"] or row["completed"] != REQUESTS for row in rows):
        raise SystemExit("a request failed, or was not sent")


def measure(engine: str, environments: Path, record: Path | None) -> list[dict[str, Any]]:
    """Returns a row per client, with a node of this engine."""
    node = f", engine: {engine}"
    if engine == "vllm":
        node += f", vllm: {{python: {environments / 'vllm' / 'bin' / 'python'}, max_loras: {len(FUNCTIONS)}}}"
    adapters = [ADAPTERS[number % len(ADAPTERS)] for number in range(len(FUNCTIONS))]
    rows: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory() as scratch,
        HttpService(MODEL, adapters, Path(scratch) / "service", "bfloat16", 0, node) as service,
    ):
        for client, (environment, run) in CLIENTS.items():
            with recorded(service.url, record / f"{client}.jsonl" if record else None) as url:
                outcome = run(Run(url, service.key, environments / environment, Path(scratch)))
            print(
                f"{engine}, {client}: {outcome.completed} requests, {outcome.failed} failed\n{outcome.output}",
                flush=True,
            )
            rows.append({"engine": engine, "client": client, **outcome._asdict()})
    return rows


if __name__ == "__main__":
    main()
