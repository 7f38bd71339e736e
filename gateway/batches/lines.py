"""A batch's input: positions of its lines, the order in which they run, and their problems."""

from __future__ import annotations

import codecs
import hashlib
from array import array
from typing import Any

import msgspec

from gateway.batches.forms import FormFields, Forms
from gateway.batches.messages import BatchProblem, Endpoint

MAX_LINES = 50_000
MAX_BLANK_LINES = 50_000
"""Maximum blank lines, because a file of blank lines would occupy a thread for minutes."""
MAX_LINE_BYTES = 1 << 20
MAX_CUSTOM_ID_CHARACTERS = 256
MAX_PROBLEMS = 50


class Line(msgspec.Struct, frozen=True):
    """Call of a batch. Unknown fields are tolerated, as OpenAI does."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Body(FormFields, frozen=True, kw_only=True):
    model: str
    stream: Any = None
    background: Any = None


_LINE, _BODY = msgspec.json.Decoder(Line), msgspec.json.Decoder(_Body)


class LineError(ValueError):
    """Error about a line of the input file."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class LineScanner:
    """Scanner of a file, which gets the file piece by piece. Blank lines count as lines, but are no calls.

    Afterwards `starts` and `sizes` have the position of each call (bytes), `numbers` its line, `forms` the forms of
    answers, and `order()` returns the order in which calls run.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.starts, self.sizes, self.numbers = array("q"), array("l"), array("l")
        self.problems: list[BatchProblem] = []
        self.forms = Forms()
        self._endpoint = endpoint
        self._models: dict[bytes, int] = {}
        """Indices of models, by digest of their names, which may be as long as a line."""
        self._functions: dict[bytes, int] = {}
        self._ranks: list[tuple[int, int]] = []
        """Sort key of each model: the index of its function, then the index of the model."""
        self._groups = array("l")
        self._ids: set[bytes] = set()
        self._blank = 0
        self._rest = bytearray()
        self._at = 0
        """Position, in bytes, at which `_rest` begins in the file."""
        self._number = 0
        self._too_long = False

    @property
    def full(self) -> bool:
        """True if further lines need not be read."""
        return len(self.problems) >= MAX_PROBLEMS or self._too_many

    def feed(self, piece: bytes) -> None:
        self._rest += piece
        while (end := self._rest.find(b"\n")) >= 0 and not self.full:
            self._end_line(end)
        if len(self._rest) > MAX_LINE_BYTES:  # the line continues, and only its length matters
            self._at += len(self._rest)
            self._rest.clear()
            self._too_long = True

    def end(self) -> None:
        """Completes the scan, after the file's last piece."""
        if (self._rest or self._too_long) and not self.full:
            self._rest += b"\n"
            self._end_line(len(self._rest) - 1)
        self._ids.clear()
        if self._too_many:
            self._report("too_many_lines", f"the file has more than {MAX_LINES} lines")
        elif not self.starts and not self.problems:
            self._report("empty_file", "the file has no lines")

    def order(self) -> array[int]:
        """Returns the indices of calls in their running order, grouped by model so that each adapter is loaded once.

        Versions and aliases of one function are adjacent. Functions are in the order of their first calls.
        """
        return array("l", sorted(range(len(self.starts)), key=lambda index: (self._ranks[self._groups[index]], index)))

    @property
    def _too_many(self) -> bool:
        return len(self.starts) > MAX_LINES or self._blank > MAX_BLANK_LINES

    def _end_line(self, end: int) -> None:
        self._number += 1
        start, line, too_long = self._at, bytes(self._rest[:end]), self._too_long or end > MAX_LINE_BYTES
        del self._rest[: end + 1]
        self._at, self._too_long = self._at + end + 1, False
        if self._number == 1 and line.startswith(codecs.BOM_UTF8):  # some editors begin files with it
            start, line = start + len(codecs.BOM_UTF8), line.removeprefix(codecs.BOM_UTF8)
        if too_long:
            self._report("line_too_long", f"the line is longer than {MAX_LINE_BYTES} bytes", self._number)
        elif line.strip():
            try:
                self._add(line, start)
            except LineError as error:
                self._report(error.code, str(error), self._number, error.param)
        else:
            self._blank += 1

    def _add(self, line: bytes, start: int) -> None:
        call = read_line(line)
        if call.method != "POST":
            raise LineError("invalid_method", "method must be POST", "method")
        if call.url != self._endpoint:
            shown = call.url[:100]
            raise LineError("invalid_url", f"url is {shown!r}, but the batch's endpoint is {self._endpoint}", "url")
        if not 1 <= len(call.custom_id) <= MAX_CUSTOM_ID_CHARACTERS:
            raise LineError(
                "invalid_custom_id", f"custom_id has 1 to {MAX_CUSTOM_ID_CHARACTERS} characters", "custom_id"
            )
        body = _body_of(call)
        digest = _digest(call.custom_id)
        if digest in self._ids:
            shown = call.custom_id[:100]
            raise LineError("duplicate_custom_id", f"the custom_id {shown!r} occurs in an earlier line", "custom_id")
        self._ids.add(digest)
        self.starts.append(start)
        self.sizes.append(len(line))
        self.numbers.append(self._number)
        self._groups.append(self._number_of(body.model))
        self.forms.add(self._number, body)

    def _number_of(self, model: str) -> int:
        """Returns the index of a model, in order of first occurrence in the file."""
        number = self._models.setdefault(_digest(model), len(self._models))
        if number == len(self._ranks):
            function = _digest(model.partition(":")[0])
            self._ranks.append((self._functions.setdefault(function, len(self._functions)), number))
        return number

    def _report(self, code: str, message: str, line: int | None = None, param: str | None = None) -> None:
        self.problems.append(BatchProblem(code, message, line, param))


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def read_line(line: bytes) -> Line:
    """Decodes a line of the input file. Raises LineError if it is no call."""
    try:
        line.decode()
        return _LINE.decode(line)
    except UnicodeDecodeError:
        raise LineError("invalid_encoding", "the line is not UTF-8") from None
    except msgspec.ValidationError as error:
        raise LineError("invalid_line", f"the line is not a call: {error}") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise LineError("invalid_json_line", f"the line is not valid JSON: {error}") from None


def _body_of(call: Line) -> _Body:
    """Returns the checked fields of the call's body. Raises LineError."""
    try:
        body = _BODY.decode(call.body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise LineError("invalid_body", f"body must be an object that names a model: {error}", "body") from None
    if body.stream not in (None, False):
        raise LineError("invalid_body", "calls of a batch are not streamed", "body.stream")
    if call.url == "/invoke" and body.background not in (None, False):
        raise LineError("invalid_body", "calls of a batch are not asynchronous", "body.background")
    return body
