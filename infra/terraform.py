"""Finds and runs Terraform or OpenTofu, reads its output, and forwards Ctrl-C to it."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from infra.errors import (
    InfraError,
    Interrupted,
    StalePlan,
    StateElsewhere,
    StateLocked,
    TerraformFailed,
    TerraformMissing,
)

PROGRAMS = ("terraform", "tofu")
OLDEST = (1, 10)
MOVED = re.compile(r"Backend configuration changed|migrat")
"""Pattern of terraform's message that the backend differs from that of the last `init`."""
LOCK_TIMEOUT = "3s"
ASK_SECONDS = 60.0
MAX_LINES = 200
INSTALL = "install Terraform 1.10 or newer (https://developer.hashicorp.com/terraform/install) or OpenTofu (https://opentofu.org)"

SECRETS = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID")
"""Environment variables whose values are removed from terraform's output."""
MEDDLING = re.compile(r"TF_(CLI_ARGS.*|WORKSPACE|DATA_DIR|LOG.*|VAR_.*)")
"""Environment variables that could change a plan after it was shown, or write requests to logs."""

Event = dict[str, Any]


class Program(msgspec.Struct, frozen=True):
    path: str
    name: str
    version: str


def find_program(search: str | None = None) -> Program:
    """Returns the first of terraform and tofu on PATH whose version is sufficient. Raises TerraformMissing."""
    old: list[str] = []
    for name in PROGRAMS:
        path = shutil.which(name, path=search)
        if path is None:
            continue
        version = _version(path)
        if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) >= OLDEST:
            return Program(path, name, version)
        old.append(f"{path} is version {version}")
    problem = "; ".join(old) or f"neither {' nor '.join(PROGRAMS)} is on PATH"
    raise TerraformMissing(f"node pools need Terraform: {problem}. {INSTALL}")


def _version(path: str) -> str:
    try:
        done = subprocess.run(
            [path, "version", "-json"], capture_output=True, timeout=ASK_SECONDS, env=environment(), check=True
        )
        return str(json.loads(done.stdout)["terraform_version"])
    except (OSError, subprocess.SubprocessError, ValueError, KeyError) as error:
        raise TerraformMissing(f"{path} does not report its version ({type(error).__name__}). {INSTALL}") from error


def environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the environment variables for terraform.

    They are those of `base`, or by default of this process, without variables that change commands. Settings for use
    without a terminal are added.
    """
    base = os.environ if base is None else base
    variables = {name: value for name, value in base.items() if not MEDDLING.fullmatch(name)}
    file = variables.get("TF_CLI_CONFIG_FILE")
    if file is not None and not Path(file).exists():
        del variables["TF_CLI_CONFIG_FILE"]  # terraform would warn about it at each call
    return {**variables, "TF_IN_AUTOMATION": "1", "TF_INPUT": "0", "CHECKPOINT_DISABLE": "1"}


class Terraform:
    """Runs terraform's commands in the directory of one root module."""

    def __init__(self, program: Program, directory: Path) -> None:
        self.program = program
        self.directory = directory

    def init(self) -> None:
        """Prepares the directory for the other commands, and downloads the root module's providers.

        Local pools need no providers. Raises StateElsewhere if `infra.state` has changed since the last command.
        """
        try:
            self._run(["init", "-no-color"], _ignore)
        except TerraformFailed as error:
            if MOVED.search(str(error)) is None:
                raise
            raise StateElsewhere(
                f"{self.program.name} -chdir={shlex.quote(str(self.directory))} init -migrate-state"
            ) from error

    def plan(self, out: str, replace: Sequence[str] = (), *, destroy: bool = False) -> None:
        flags = [*(f"-replace={address}" for address in replace), *(["-destroy"] if destroy else [])]
        self._run(["plan", "-json", f"-lock-timeout={LOCK_TIMEOUT}", f"-out={out}", *flags], _ignore)

    def apply(self, plan: str, on_event: Callable[[Event], None]) -> None:
        """Applies exactly the saved plan; `on_event` is called with each event."""
        self._run(["apply", "-json", f"-lock-timeout={LOCK_TIMEOUT}", plan], on_event)

    def show(self, plan: str | None = None) -> dict[str, Any]:
        """Returns the state, or a saved plan, in Terraform's documented JSON form."""
        command = [self.program.path, "show", "-json", *([plan] if plan else [])]
        try:
            done = subprocess.run(
                command, cwd=self.directory, env=environment(), capture_output=True, timeout=ASK_SECONDS, text=True
            )
        except subprocess.TimeoutExpired:
            raise TerraformFailed(
                f"`{self.program.name} show` took more than {ASK_SECONDS:g} s: does the place of the state "
                "(infra.state) answer?"
            ) from None
        if done.returncode != 0:
            raise self._killed(done.returncode) or _explained(done.stderr.splitlines(), [])
        shown: dict[str, Any] = json.loads(done.stdout)
        return shown

    def _run(self, arguments: list[str], on_event: Callable[[Event], None]) -> None:
        with self._started(arguments) as process, _forward_signals(process) as interrupts:
            assert process.stdout is not None
            try:
                text, problems = _follow(process.stdout, on_event)
            except BaseException:
                _interrupt_and_wait(process, interrupts)
                raise
            code = process.wait()
        if killed := self._killed(code):
            raise killed
        if code != 0 and interrupts:
            raise Interrupted("interrupted; Terraform has saved what was done, and the next plan shows what is left")
        if code != 0:
            raise _explained(text, problems)

    def _killed(self, code: int) -> TerraformFailed | None:
        if code >= 0:
            return None
        description = signal.strsignal(-code) or "unknown"
        return TerraformFailed(
            f"{self.program.name} was ended by signal {-code} ({description}); the next plan shows what is left to do"
        )

    @contextmanager
    def _started(self, arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
        # terraform has a separate process group: Ctrl-C reaches it only through this process, and not its children.
        process = subprocess.Popen(
            [self.program.path, *arguments],
            cwd=self.directory,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            process_group=0,
            umask=0o077,
        )
        with process:
            try:
                yield process
            except BaseException:
                process.send_signal(signal.SIGINT)  # no effect if it has ended; the end of `with` waits for it
                raise


def _interrupt_and_wait(process: subprocess.Popen[str], interrupts: list[int]) -> None:
    """Interrupts terraform unless that was already done, and reads its output to the end.

    Terraform saves its state before it ends. If nobody read its output, a closed pipe would kill Terraform before it
    has saved the state.
    """
    if not interrupts:
        interrupts.append(signal.SIGINT)
        process.send_signal(signal.SIGINT)
    _follow(process.stdout, _ignore)
    process.wait()


def _follow(stream: Any, on_event: Callable[[Event], None]) -> tuple[list[str], list[Event]]:
    """Calls `on_event` with each of terraform's events until its output ends.

    Returns the last MAX_LINES lines that are not events, and the events that are errors.
    """
    text: list[str] = []
    problems: list[Event] = []
    for line in stream:
        event = _event(line)
        if event is None:
            text = [*text[1 - MAX_LINES :], line.rstrip("\n")]
            continue
        if event.get("type") == "diagnostic" and event["diagnostic"].get("severity") == "error":
            problems.append(event["diagnostic"])
        on_event(event)
    return text, problems


def _event(line: str) -> Event | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "@message" in event else None


@contextmanager
def _forward_signals(process: subprocess.Popen[str]) -> Iterator[list[int]]:
    """Forwards TERM, INT and HUP to terraform as a single INT, while the context runs.

    Yields the list of received signals, which grows. After an INT Terraform saves its state and ends; a second INT
    would abort it. A signal that is ignored already (by `nohup`, or in the background of a script) stays ignored.
    """
    received: list[int] = []
    before: dict[int, Any] = {}

    def forward(number: int, _frame: FrameType | None) -> None:
        if not received:
            process.send_signal(signal.SIGINT)
        received.append(number)
        if callable(previous := before[number]) and previous is not signal.default_int_handler:
            previous(number, _frame)  # the handler of a program that runs longer than this command

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    before |= {number: handler for number, handler in handlers.items() if handler is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, forward)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _explained(text: list[str], problems: list[Event]) -> InfraError:
    """Returns terraform's output as an error, with advice if the error is known."""
    said = "\n".join(_diagnostic(problem) for problem in problems) or _plain(text)
    said = redacted(said)
    if "Error acquiring the state lock" in said or ("state lock" in said.lower() and "acquir" in said.lower()):
        holder = _lock_holder(said)
        return StateLocked(f"the state is locked: {holder}; try again when that work has ended{_unlocking(said)}")
    if "Saved plan is stale" in said:
        return StalePlan("the saved plan is stale, for the state has changed since; run `garnish infra plan` again")
    if "No valid credential sources found" in said or "failed to refresh cached credentials" in said:
        return TerraformFailed(missing_credentials())
    return TerraformFailed(f"terraform failed:\n{said}")


def missing_credentials() -> str:
    return (
        "AWS credentials are missing: set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or use an "
        "instance role"
    )


def _diagnostic(problem: Event) -> str:
    where = f" ({problem['address']})" if problem.get("address") else ""
    detail = str(problem.get("detail", "")).strip()
    return f"{problem.get('summary', 'Error')}{where}" + (f": {detail}" if detail else "")


def _plain(text: list[str]) -> str:
    lines = [line.strip(" │╷╵") for line in text]
    begin = next((number for number, line in enumerate(lines) if line.startswith("Error")), 0)
    return "\n".join(line for line in lines[begin:] if line)


def _lock_holder(said: str) -> str:
    fields = dict(re.findall(r"^\s*(Who|Created|Operation):\s+(.+)$", said, re.MULTILINE))
    if not fields:
        return "someone else holds it"
    return f"{fields.get('Who', 'someone')} holds it since {fields.get('Created', 'some time')}"


def _unlocking(said: str) -> str:
    """Returns advice on how to remove the lock of a terraform that was killed, which remains on S3.

    Returns "" if the output has no lock id.
    """
    match = re.search(r"^\s*ID:\s+(\S+)$", said, re.MULTILINE)
    if match is None:
        return ""
    return f". If it was killed, `terraform force-unlock {match[1]}` in the root module's directory gives the lock back"


def redacted(text: str, base: Mapping[str, str] | None = None) -> str:
    """Returns the text without the values of credentials in `base`, by default the environment."""
    base = os.environ if base is None else base
    for name in SECRETS:
        value = base.get(name, "")
        if len(value) >= 8:
            text = text.replace(value, f"({name})")
    return text


def _ignore(_event: Event) -> None:
    pass
