"""Inspection of adapters' configs and headers in one helper process with low priority and limits (see
inspector_process)."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import msgspec

from adapters.base_model import BaseModel
from adapters.errors import InspectionBusy, InvalidAdapter, Problem, TooLarge
from adapters.helper_process import HelperEnded, HelperProcess
from adapters.inspector_process import MATCH_SECONDS, READ_SECONDS, Answer, Failed, Job, Oversized, Refused
from adapters.peft_config import CONFIG_FILE, WEIGHTS_FILE, field_problem
from adapters.validate import Inspection

WAIT_SECONDS = 60.0
"""Maximum time to wait for earlier adapters."""
ANSWER_SECONDS = 60.0
"""Maximum time to wait for one answer, including the start of the process. The process's own limits are in CPU time.
This limit ends the wait on a host that gives the process almost no CPU time."""


class Inspector:
    """Inspects adapters in a helper process, one at a time. The process starts with the first adapter, and restarts
    after it was killed.

    Methods block, and may be called from any thread.
    """

    def __init__(self, base: BaseModel) -> None:
        self._lock = threading.Lock()
        self.helper = HelperProcess("adapters.inspector_process", hello=lambda: base)

    def inspect(self, config: bytes, weights: Path) -> Inspection:
        """Returns the inspection of a config and of the weights file's header. Raises InvalidAdapter (also for
        excessive memory or time), TooLarge or InspectionBusy."""
        if not self._lock.acquire(timeout=WAIT_SECONDS):
            raise InspectionBusy(f"other adapters were inspected for {WAIT_SECONDS:g} s; try again later")
        try:
            answer = self._ask(Job(config, str(weights.absolute()), MATCH_SECONDS))
            if answer.last:
                self.helper.end()
        finally:
            self._lock.release()
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
        """Kills the process, and with it an inspection in progress."""
        self.helper.kill()

    def _ask(self, job: Job) -> Answer:
        try:
            return msgspec.msgpack.decode(self.helper.ask(job, ANSWER_SECONDS), type=Answer)
        except TimeoutError:
            raise InspectionBusy(
                f"this host is too busy to inspect an adapter within {ANSWER_SECONDS:g} s; try again later"
            ) from None
        except HelperEnded as ended:
            raise _why(ended.code) from None


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
