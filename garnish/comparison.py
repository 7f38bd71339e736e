"""Compares a function's answers with those of PEFT, token by token.

The function is called over HTTP. PEFT runs without Garnish, in a child process.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from adapters.blobs import blob_key
from adapters.errors import AdapterError
from adapters.open_store import open_store
from adapters.peft_config import CONFIG_FILE, WEIGHTS_FILE
from adapters.store import ObjectStore
from garnish.adapter_folder import adapter_files
from garnish.child_messages import child_messages
from garnish.client import Client
from garnish.config import ServiceFile
from garnish.errors import FrontDoorError
from garnish.settings import registry_of, resolve_base
from gateway.api.schema import InvokeReply, Logprob
from gateway.routes.functions import VersionReply
from node_agent.peft_types import Failed, Loaded, PeftAnswer, PeftJob, PeftMessage, PeftPrompt, Position

FP32_TIE = 1e-4
EPSILON = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
COMMAND = (sys.executable, "-m", "node_agent.peft_process")
NEEDED = {"torch": "torch", "transformers": "transformers", "peft": "'peft>=0.21'"}
"""Modules that the child process imports, each with its requirement for pip."""
PROMPT_SECONDS = 1800.0
TOP = 20
"""Number of log probabilities per token, the maximum that a reply lists."""
READ_BYTES = 8 << 20


class Difference(msgspec.Struct, frozen=True):
    """A token of the function's answer that differs from PEFT's choice after the same preceding tokens."""

    position: int
    function_token: int
    peft_token: int
    behind: float
    """PEFT's largest logit minus PEFT's logit of the function's token"""
    gap: float
    tie_below: float
    """a `behind` below this bound can be caused by rounding, so the tokens are tied"""

    @property
    def is_tie(self) -> bool:
        return self.behind < self.tie_below


class Row(msgspec.Struct, frozen=True):
    """The comparison of one prompt's answers."""

    prompt: str
    tokens: int
    differences: list[Difference]
    prompt_tokens: tuple[int, int]
    """counts by the service and by PEFT; if they are unequal, the prompts differed"""
    logprob_difference: float
    """maximum difference between the log probabilities of the service and of PEFT, over all tokens and positions"""
    function_seconds: float
    peft_seconds: float
    function_text: str
    peft_text: str

    @property
    def is_equal(self) -> bool:
        """True if the numbers of prompt tokens are equal, and the answers' tokens are equal except for ties."""
        return self.prompt_tokens[0] == self.prompt_tokens[1] and all(
            difference.is_tie for difference in self.differences
        )


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    function: str
    device: str
    dtype: str
    """dtype in which PEFT computed; the node has the same dtype if it was started with the same service file"""
    equal: bool
    tokens: int
    tokens_equal: int
    ties: int
    logprob_difference: float
    function_seconds: float
    peft_seconds: float
    peft_load_seconds: float
    rows: list[Row]


def compare_row(prompt: str, reply: InvokeReply, seconds: float, answer: PeftAnswer, dtype: str) -> Row:
    listed = reply.output.logprobs or []
    return Row(
        prompt=prompt,
        tokens=len(listed),
        differences=[
            _difference(index, entry, position, dtype)
            for index, (entry, position) in enumerate(zip(listed, answer.positions, strict=True))
            if entry.token_id != position.best
        ],
        prompt_tokens=(reply.usage.prompt_tokens, answer.prompt_tokens),
        logprob_difference=max(map(_logprob_difference, listed, answer.positions), default=0.0),
        function_seconds=seconds,
        peft_seconds=answer.seconds,
        function_text=reply.output.text,
        peft_text=answer.text,
    )


def summarise(function: str, loaded: Loaded, rows: list[Row]) -> Comparison:
    return Comparison(
        function=function,
        device=loaded.device,
        dtype=loaded.dtype,
        equal=all(row.is_equal for row in rows),
        tokens=sum(row.tokens for row in rows),
        tokens_equal=sum(row.tokens - len(row.differences) for row in rows),
        ties=sum(difference.is_tie for row in rows for difference in row.differences),
        logprob_difference=max(row.logprob_difference for row in rows),
        function_seconds=sum(row.function_seconds for row in rows),
        peft_seconds=sum(row.peft_seconds for row in rows),
        peft_load_seconds=loaded.seconds,
        rows=rows,
    )


def tie_width(size: float, dtype: str) -> float:
    """Returns the difference between two logits below which rounding can change which one is larger.

    It is the maximum of 1e-4 and two rounding errors in `dtype` at the best logit's `size`.
    """
    return max(FP32_TIE, 2 * EPSILON[dtype] * size)


def _difference(index: int, entry: Logprob, position: Position, dtype: str) -> Difference:
    return Difference(
        position=index,
        function_token=entry.token_id,
        peft_token=position.best,
        behind=position.behind,
        gap=position.gap,
        tie_below=tie_width(position.size, dtype),
    )


def _logprob_difference(entry: Logprob, position: Position) -> float:
    return max(
        (abs(item.logprob - peft_logprob) for item, peft_logprob in zip(entry.top, position.logprobs, strict=True)),
        default=0.0,
    )


class ComparisonRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of `garnish compare`."""

    name: str
    prompts: list[str]
    chat: bool | None
    """True sends prompts as user messages; None does so if the base model has a chat template."""
    max_tokens: int
    adapter: Path | None
    """folder that was deployed; with None the adapter's files are read from the registry"""
    state: Path


def check_installed() -> None:
    """Raises FrontDoorError if a module that PEFT needs is missing; the message says what to install."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        packages = " ".join(NEEDED[name] for name in missing)
        raise FrontDoorError(
            f"compare --peft runs transformers and PEFT in a separate process, and {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not installed here: {sys.executable} -m pip install {packages}"
        )


def run_comparison(
    request: ComparisonRequest, service: ServiceFile, client: Client, step: Callable[[str], None]
) -> Comparison:
    """Calls the function, then runs PEFT, and returns the comparison.

    `step` is called with a text about the current step. Raises FrontDoorError.
    """
    model = resolve_base(service).directory
    version = _version(client, request.name)
    pinned = f"{version.function}:{version.version}"
    if request.adapter is not None:
        files = named_folder(request.adapter, version)
    else:
        files = registry_folder(find_registry(service, request.state.absolute()), version)
    with files as folder:
        if request.chat is None:
            request = msgspec.structs.replace(request, chat=has_chat_template(model))
        replies, seconds = _ask_function(client, pinned, request, step)
        job = PeftJob(
            parent=os.getpid(),
            model_dir=str(model),
            adapter_dir=str(folder),
            device=service.node.device,
            dtype=service.node.dtype,
            max_tokens=request.max_tokens,
            prompts=[_peft_prompt(request, *part) for part in zip(request.prompts, replies, strict=True)],
        )
        loaded, answers = ask_peft(job, step)
    parts = zip(request.prompts, replies, seconds, answers, strict=True)
    return summarise(pinned, loaded, [compare_row(*part, loaded.dtype) for part in parts])


def _version(client: Client, name: str) -> VersionReply:
    """Calls the function `name` once, and returns the version that served the call.

    Raises FrontDoorError if that is the base model.
    """
    reply = client.invoke(name, "Hello", stream=False, max_tokens=1)
    if reply.version is None:
        raise FrontDoorError(f"{name} is the base model itself: name a function, whose adapter PEFT can load")
    versions = client.versions(reply.function).versions
    return next(entry for entry in versions if entry.version == reply.version)


def has_chat_template(model: Path) -> bool:
    """Returns True if the model's directory has a chat template.

    Returns False if the tokenizer's settings can't be read.
    """
    if (model / "chat_template.jinja").is_file():
        return True
    try:
        return bool(json.loads((model / "tokenizer_config.json").read_bytes()).get("chat_template"))
    except (OSError, ValueError):
        return False


def _ask_function(
    client: Client, name: str, request: ComparisonRequest, step: Callable[[str], None]
) -> tuple[list[InvokeReply], list[float]]:
    """Calls the function with one prompt after another.

    Returns the greedy answers and the seconds of each call. Raises GarnishError.
    """
    options: dict[str, Any] = {
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "logprobs": TOP,
        # fields that a policy may set, and that would change greedy answers
        **{"presence_penalty": 0, "frequency_penalty": 0, "stop": [], "ignore_eos": False},
    }
    # A cold start must not count in the comparison.
    client.invoke(name, _as_sent(request, request.prompts[0]), stream=False, **{**options, "max_tokens": 1})
    replies, seconds = [], []
    for number, prompt in enumerate(request.prompts, 1):
        step(f"asking {name}: prompt {number} of {len(request.prompts)}")
        started = time.perf_counter()
        replies.append(client.invoke(name, _as_sent(request, prompt), stream=False, **options))
        seconds.append(time.perf_counter() - started)
    return replies, seconds


def _as_sent(request: ComparisonRequest, prompt: str) -> str | list[dict[str, str]]:
    return [{"role": "user", "content": prompt}] if request.chat else prompt


def _peft_prompt(request: ComparisonRequest, prompt: str, reply: InvokeReply) -> PeftPrompt:
    listed = reply.output.logprobs or []
    sent = _as_sent(request, prompt)
    return PeftPrompt(
        text=sent if isinstance(sent, str) else None,
        messages=None if isinstance(sent, str) else sent,
        tokens=[entry.token_id for entry in listed],
        top=[[item.token_id for item in entry.top] for entry in listed],
    )


def ask_peft(
    job: PeftJob, step: Callable[[str], None], command: Sequence[str] = COMMAND
) -> tuple[Loaded, list[PeftAnswer]]:
    """Runs PEFT in a child process, and returns what it loaded and its answers to the job's prompts.

    `step` is called with a text about the current step. Raises FrontDoorError.
    """
    answers: list[PeftAnswer] = []
    loaded: Loaded | None = None
    step("loading the base model and the adapter with PEFT")
    with contextlib.closing(child_messages(command, job, doing="PEFT's process", patience=PROMPT_SECONDS)) as messages:
        for entry in messages:
            message: PeftMessage = msgspec.convert(entry, PeftMessage)
            if isinstance(message, Failed):
                raise FrontDoorError(f"PEFT can't run the adapter here: {message.message}")
            if isinstance(message, Loaded):
                loaded = message
            else:
                answers.append(message)
            if len(answers) < len(job.prompts):
                step(f"asking PEFT: prompt {len(answers) + 1} of {len(job.prompts)}")
    if loaded is None or len(answers) < len(job.prompts):
        raise FrontDoorError("PEFT's process ended too early; its log is above")
    return loaded, answers


ELSEWHERE = (
    "name the service's state directory with --state or its service file with -f, or the folder that was deployed with "
    "--adapter"
)
"""Advice for a registry that is not the service's."""


def find_registry(service: ServiceFile, state: Path) -> str:
    """Returns the registry's address: the one in the service file, or the state directory's if that is not here.

    Raises FrontDoorError if neither is here.
    """
    in_file, of_state = registry_of(service, state), str(state / "registry")
    for registry in (in_file, of_state):
        if "://" in registry or Path(registry).is_dir():
            return registry
    nor = "" if of_state == in_file else f", nor {of_state}"
    raise FrontDoorError(f"there is no registry {in_file} here{nor}: {ELSEWHERE}")


@contextlib.contextmanager
def registry_folder(registry: str, version: VersionReply) -> Iterator[Path]:
    """Yields a temporary folder with the version's two files from the registry, checked against their hashes.

    Raises FrontDoorError if the registry can't be read, or the files were changed.
    """
    with tempfile.TemporaryDirectory(prefix="garnish-") as folder:
        try:
            store = open_store(registry)
            _copy(store, version.config_sha256, Path(folder) / CONFIG_FILE)
            _copy(store, version.weights_sha256, Path(folder) / WEIGHTS_FILE)
        except AdapterError as error:
            raise FrontDoorError(
                f"the registry {registry} does not give the files of {version.function}:{version.version} "
                f"({error}): {ELSEWHERE}"
            ) from None
        yield Path(folder)


@contextlib.contextmanager
def named_folder(folder: Path, version: VersionReply) -> Iterator[Path]:
    """Yields `folder` if its files are those of the version. Raises FrontDoorError otherwise."""
    files = adapter_files(folder, "--adapter {}")
    hashes = files.sha256()
    if hashes != (version.config_sha256, version.weights_sha256):
        changed_file = CONFIG_FILE if hashes[1] == version.weights_sha256 else WEIGHTS_FILE
        name = f"{version.function}:{version.version}"
        raise FrontDoorError(f"{folder} differs from what {name} was deployed with: another {changed_file}")
    yield folder


def _copy(store: ObjectStore, sha256: str, target: Path) -> None:
    digest, start = hashlib.sha256(), 0
    with target.open("wb") as out:
        while data := store.get_range(blob_key(sha256), start, READ_BYTES):
            out.write(data)
            digest.update(data)
            start += len(data)
    if digest.hexdigest() != sha256:
        raise FrontDoorError(f"{target.name} in the registry was changed: `garnish registry verify` names what else is")
