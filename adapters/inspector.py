"""Inspection of adapters' configs and headers in helper processes with low priority and limits (see
inspector_process)."""

from __future__ import annotations

import queue
import signal
from pathlib import Path

import msgspec

from adapters.base_model import BaseModel
from adapters.errors import InspectionBusy, InvalidAdapter, Problem, TooLarge
from adapters.helper_process import HelperEnded, HelperProcess
from adapters.inspector_process import MATCH_SECONDS, READ_SECONDS, Answer, Failed, Job, Oversized, Refused
from adapters.modules import Modules
from adapters.peft_config import CONFIG_FILE, WEIGHTS_FILE, LoraSettings, field_problem
from adapters.peft_targets import Target, find_targets, has_patterns
from adapters.validate import Inspection, inspect_files

WAIT_SECONDS = 60.0
"""Maximum time to wait for earlier adapters."""
ANSWER_SECONDS = 60.0
"""Maximum time to wait for one answer, including the start of the process. The process's own limits are in CPU time.
This limit ends the wait on a host that gives the process almost no CPU time."""


class Inspector:
    """Inspects adapters in helper processes, each of which has one adapter at a time. A process starts when it gets its
    first adapter, and restarts after it was killed.

    Methods block, and may be called from any thread.
    """

    def __init__(self, base: BaseModel, processes: int = 1) -> None:
        self.helpers = [HelperProcess("adapters.inspector_process", hello=lambda: base) for _ in range(processes)]
        self.idle: queue.LifoQueue[HelperProcess] = queue.LifoQueue()
        """Helpers without an adapter. The last used one is used next, so that few processes start."""
        for helper in self.helpers:
            self.idle.put(helper)

    def inspect(self, config: bytes, weights: Path) -> Inspection:
        """Returns the inspection of a config and of the weights file's header. Raises InvalidAdapter (also for
        excessive memory or time), TooLarge or InspectionBusy."""
        try:
            helper = self.idle.get(timeout=WAIT_SECONDS)
        except queue.Empty:
            raise InspectionBusy(f"other adapters were inspected for {WAIT_SECONDS:g} s; try again later") from None
        try:
            answer = self._ask(helper, Job(config, str(weights.absolute()), MATCH_SECONDS))
            if answer.last:
                helper.end()
        finally:
            self.idle.put(helper)
        match answer.outcome:
            case Refused(problems, omitted):
                raise InvalidAdapter(problems, omitted)
            case Oversized(message, limit):
                raise TooLarge(message, limit)
            case Failed(trace):
                raise RuntimeError(f"an adapter could not be inspected: {trace}")
            case inspection:
                return inspection

    def close(self) -> None:
        """Kills the processes, and with them inspections in progress."""
        for helper in self.helpers:
            helper.kill()

    def _ask(self, helper: HelperProcess, job: Job) -> Answer:
        try:
            return msgspec.msgpack.decode(helper.ask(job, ANSWER_SECONDS), type=Answer)
        except TimeoutError:
            raise InspectionBusy(
                f"this host is too busy to inspect an adapter within {ANSWER_SECONDS:g} s; try again later"
            ) from None
        except HelperEnded as ended:
            raise _why(ended.code) from None


class _HasPatterns(Exception):
    """The config has regular expressions, so the helper process must match them."""


def inspect_once(config: bytes, weights: Path, base: BaseModel) -> Inspection:
    """Returns the inspection of one adapter, in the calling thread. A config with regular expressions is inspected in a
    helper process, which limits their time and then ends. Raises the errors of Inspector.inspect."""
    try:
        return inspect_files(config, weights, base, _find_plain)
    except _HasPatterns:
        inspector = Inspector(base)
        try:
            return inspector.inspect(config, weights)
        finally:
            inspector.helpers[0].end()


def _find_plain(settings: LoraSettings, modules: Modules) -> list[Target]:
    if has_patterns(settings):
        raise _HasPatterns
    return find_targets(settings, modules)


def _why(code: int) -> Exception:
    """Returns the error for a process that ended during its work with this exit code."""
    if code == -signal.SIGVTALRM:
        problem = "its regular expressions take too long to match"
        return InvalidAdapter([field_problem("target_modules", problem, f"{MATCH_SECONDS:g} s")])
    if code == -signal.SIGPROF:
        return InvalidAdapter([Problem(WEIGHTS_FILE, "reading its header takes too long", f"{READ_SECONDS:g} s")])
    if code in (-signal.SIGKILL, -signal.SIGTERM):
        return InspectionBusy("the process that looks at adapters was ended from outside; try again later")
    if code < 0:
        return InvalidAdapter([Problem(CONFIG_FILE, "it breaks the process that looks at it")])
    return RuntimeError(f"the process that looks at adapters ended with exit code {code}")
