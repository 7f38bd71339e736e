"""Asks a function over HTTP and PEFT alone in a child process the same prompts."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from garnish.child_messages import child_messages
from garnish.client import Client
from garnish.comparison import Comparison, compare_row, summarise
from garnish.config import ServiceFile
from garnish.errors import FrontDoorError
from garnish.function_files import named_folder, registry_folder
from garnish.settings import registry_of, resolve_base
from gateway.api.schema import InvokeReply
from gateway.routes.functions import VersionReply
from node_agent.peft_types import Failed, Loaded, PeftAnswer, PeftJob, PeftMessage, PeftPrompt

COMMAND = (sys.executable, "-m", "node_agent.peft_process")
NEEDED = {"torch": "torch", "transformers": "transformers", "peft": "'peft>=0.21'"}
"""What the process imports, and how pip calls it."""
PATIENCE = 1800.0
"""Seconds per prompt: a large base on few cores takes its time."""
TOP = 20
"""Log probabilities per token: as many as a reply lists."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What `garnish compare` was asked to do."""

    name: str
    prompts: list[str]
    chat: bool | None
    """Whether prompts are sent as a user's messages; None: where the base model has a chat template."""
    max_tokens: int
    adapter: Path | None
    """The folder that was deployed; None: its files are read from the registry."""
    state: Path


def check_installed() -> None:
    """Raises FrontDoorError when PEFT can't run here, with what to install."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        wanted = " ".join(NEEDED[name] for name in missing)
        raise FrontDoorError(
            f"compare --peft runs transformers and PEFT in a process of its own, and {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not installed here: {sys.executable} -m pip install {wanted}"
        )


def run_comparison(wanted: Wanted, service: ServiceFile, client: Client, step: Callable[[str], None]) -> Comparison:
    """Asks the function, then PEFT alone, and returns the comparison. `step` is told what is being done. Raises
    FrontDoorError."""
    model = resolve_base(service).directory
    version = _version(client, wanted.name)
    pinned = f"{version.function}:{version.version}"
    if wanted.adapter is not None:
        files = named_folder(wanted.adapter, version)
    else:
        files = registry_folder(registry_of(service, wanted.state.absolute()), version)
    with files as folder:
        if wanted.chat is None:
            wanted = msgspec.structs.replace(wanted, chat=has_chat_template(model))
        replies, seconds = _ask_function(client, pinned, wanted, step)
        job = PeftJob(
            parent=os.getpid(),
            model_dir=str(model),
            adapter_dir=str(folder),
            device=service.node.device,
            dtype=service.node.dtype,
            max_tokens=wanted.max_tokens,
            prompts=[_peft_prompt(wanted, *part) for part in zip(wanted.prompts, replies, strict=True)],
        )
        loaded, answers = ask_peft(job, step)
    parts = zip(wanted.prompts, replies, seconds, answers, strict=True)
    return summarise(pinned, loaded, [compare_row(*part, loaded.dtype) for part in parts])


def _version(client: Client, name: str) -> VersionReply:
    """Returns the version that a call of the name gets, which is found out by a call. Raises FrontDoorError for the
    base model itself."""
    reply = client.invoke(name, "Hello", stream=False, max_tokens=1)
    if reply.version is None:
        raise FrontDoorError(f"{name} is the base model itself: name a function, whose adapter PEFT can load")
    known = client.versions(reply.function).versions
    return next(entry for entry in known if entry.version == reply.version)


def has_chat_template(model: Path) -> bool:
    """Returns whether the model's directory has a chat template; False also when its tokenizer's settings can't be
    read."""
    if (model / "chat_template.jinja").is_file():
        return True
    try:
        return bool(json.loads((model / "tokenizer_config.json").read_bytes()).get("chat_template"))
    except (OSError, ValueError):
        return False


def _ask_function(
    client: Client, name: str, wanted: Wanted, step: Callable[[str], None]
) -> tuple[list[InvokeReply], list[float]]:
    """Returns each prompt's greedy answer and its seconds, asked for one call at a time. Raises GarnishError."""
    options: dict[str, Any] = {
        "max_tokens": wanted.max_tokens,
        "temperature": 0,
        "logprobs": TOP,
        # what a policy may set, and would change greedy answers
        **{"presence_penalty": 0, "frequency_penalty": 0, "stop": [], "ignore_eos": False},
    }
    # A cold start is no part of the comparison.
    client.invoke(name, _as_sent(wanted, wanted.prompts[0]), stream=False, **{**options, "max_tokens": 1})
    replies, seconds = [], []
    for number, prompt in enumerate(wanted.prompts, 1):
        step(f"asking {name}: prompt {number} of {len(wanted.prompts)}")
        begun = time.perf_counter()
        replies.append(client.invoke(name, _as_sent(wanted, prompt), stream=False, **options))
        seconds.append(time.perf_counter() - begun)
    return replies, seconds


def _as_sent(wanted: Wanted, prompt: str) -> str | list[dict[str, str]]:
    return [{"role": "user", "content": prompt}] if wanted.chat else prompt


def _peft_prompt(wanted: Wanted, prompt: str, reply: InvokeReply) -> PeftPrompt:
    listed = reply.output.logprobs or []
    sent = _as_sent(wanted, prompt)
    return PeftPrompt(
        text=sent if isinstance(sent, str) else None,
        messages=None if isinstance(sent, str) else sent,
        tokens=[entry.token_id for entry in listed],
        top=[[item.token_id for item in entry.top] for entry in listed],
    )


def ask_peft(
    job: PeftJob, step: Callable[[str], None], command: Sequence[str] = COMMAND
) -> tuple[Loaded, list[PeftAnswer]]:
    """Runs PEFT alone in a child process and returns its answers to the job's prompts. Raises FrontDoorError. `step` is
    told what is done now."""
    answers: list[PeftAnswer] = []
    loaded: Loaded | None = None
    step("loading the base model and the adapter with PEFT")
    with contextlib.closing(child_messages(command, job, doing="PEFT's process", patience=PATIENCE)) as messages:
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
        raise FrontDoorError("PEFT's process ended before it was done; its log is above")
    return loaded, answers
