"""Formats generations as OpenAI's API does: full replies and chunks of a stream."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence

import msgspec

from cluster.errors import ServiceError
from cluster.messages import Done, Token, TokenLogprob, TopLogprob
from gateway.api import openai_schema as openai
from gateway.calls.answers import AnswerForm, AnswerParser, AnswerPiece, Reasoning
from gateway.calls.dispatch import Generation, events_of
from gateway.calls.reply import Outcome
from gateway.calls.request import Echo
from gateway.calls.tool_calls import CallArguments, CallBegin, Text
from gateway.http.errors import openai_body
from gateway.http.event_stream import sse

END = b"data: [DONE]\n\n"

StreamedChoice = openai.ChunkChoice | openai.CompletionChoice
StreamedReply = openai.ChatChunk | openai.Completion


class Head(msgspec.Struct, frozen=True):
    """Fields that all chunks of one reply repeat, and options of its format."""

    id: str
    model: str
    chat: bool
    logprobs: bool
    include_usage: bool
    choices: int = 1
    top_logprob_count: int = 0
    echo: list[Echo] = []
    form: AnswerForm | None = None
    """Form of a chat's answers; None: they are text alone."""
    opened: list[bool] = []
    """True for each generation whose prompt has opened the reasoning; empty if reasoning is not separated."""
    prompt_logprobs: bool = False
    continuous_usage: bool = False
    prompt_token_ids: list[list[int]] = []
    """Ids of each generation's prompt, if token ids are requested."""
    created: int = msgspec.field(default_factory=lambda: int(time.time()))

    def echo_of(self, index: int) -> Echo | None:
        """Returns the echo at the beginning of the generation's text; None if nothing is echoed."""
        return self.echo[index // self.choices] if self.echo else None

    def prompt_ids_of(self, index: int) -> list[int] | None:
        """Returns the ids of the generation's prompt; None if token ids are not requested."""
        return self.prompt_token_ids[index] if self.prompt_token_ids else None

    def token_ids(self, ids: list[int]) -> list[int] | None:
        """Returns the ids of generated tokens; None if they are not requested."""
        return ids if self.prompt_token_ids else None

    def parser(self, index: int) -> AnswerParser:
        """Returns a parser of the generation's answer."""
        assert self.form is not None
        return AnswerParser(self.form, opened=bool(self.opened) and self.opened[index])


def full_reply(head: Head, outcomes: Sequence[Outcome]) -> openai.Completion | openai.Chat:
    ends = [outcome.done for outcome in outcomes]
    if head.chat:
        answers = [_chat(head, *pair) for pair in enumerate(outcomes)]
        return openai.Chat(
            id=head.id,
            object="chat.completion",
            created=head.created,
            model=head.model,
            choices=answers,
            usage=usage_of(head, ends, sum(outcome.reasoning_tokens for outcome in outcomes)),
            prompt_logprobs=_prompt_logprobs(head, outcomes[0]),
            prompt_token_ids=head.prompt_ids_of(0),
        )
    choices = [_completion(head, *pair) for pair in enumerate(outcomes)]
    return openai.Completion(head.id, head.created, head.model, choices, usage_of(head, ends))


def _chat(head: Head, index: int, outcome: Outcome) -> openai.ChatChoice:
    message, done = openai.Reply(content=outcome.text), outcome.done
    reason = finish_reason(done)
    if head.form is not None:
        message = _message(head.parser(index), outcome)
        reason = "tool_calls" if message.tool_calls and reason == "stop" else reason
    logprobs, token_ids = _chat_logprobs(head, outcome.logprobs), head.token_ids(outcome.token_ids)
    return openai.ChatChoice(index, message, reason, logprobs, done.stop_reason, token_ids)


def _message(parser: AnswerParser, outcome: Outcome) -> openai.Reply:
    """Returns the message of an answer that may have reasoning and tool calls."""
    content, reasoning, calls = "", "", dict[int, openai.CallMade]()
    pieces = [piece for text, tokens in outcome.pieces for piece in parser.feed(text, tokens)]
    for piece in [*pieces, *parser.feed("", 0, last=True)]:
        match piece:
            case Text(part):
                content += part
            case Reasoning(part):
                reasoning += part
            case CallBegin(at, name, id):
                calls[at] = openai.CallMade(id, openai.CalledFunction(name, ""))
            case CallArguments(at, part):
                function = calls[at].function
                function = msgspec.structs.replace(function, arguments=function.arguments + part)
                calls[at] = msgspec.structs.replace(calls[at], function=function)
    outcome.reasoning_tokens = parser.reasoning_tokens
    return openai.Reply(
        content or (None if calls else ""),
        tool_calls=list(calls.values()) if calls else msgspec.UNSET,
        reasoning_content=reasoning or msgspec.UNSET,
    )


def _completion(head: Head, index: int, outcome: Outcome) -> openai.CompletionChoice:
    echo = head.echo_of(index)
    entries = [*_echoed_tokens(head, outcome.prompt_logprobs), *outcome.logprobs]
    return openai.CompletionChoice(
        index,
        (echo.text if echo else "") + outcome.text,
        finish_reason(outcome.done),
        _completion_logprobs(head, entries, echo),
        outcome.done.stop_reason,
        _prompt_logprobs(head, outcome),
        head.token_ids(outcome.token_ids),
        head.prompt_ids_of(index),
    )


async def chunks(head: Head, generations: Sequence[Generation]) -> AsyncGenerator[bytes, None]:
    """Yields the stream's events, up to `[DONE]`. Raises ServiceError."""
    kind: Callable[..., StreamedReply] = openai.ChatChunk if head.chat else openai.Completion
    choices = [_StreamedChoices(head, index, generation) for index, generation in enumerate(generations)]
    usage: openai.TokenUsage | None = None
    async with events_of(generations) as events:
        async for index, event in events:
            for choice in choices[index].of(event):
                if head.continuous_usage:
                    usage = _usage_so_far(head, generations, sum(each.completed for each in choices))
                chunk = kind(head.id, head.created, head.model, [choice], usage)
                yield sse(_with_prompt_ids(chunk, head, choice))
    if head.include_usage:
        reasoning = sum(each.parser.reasoning_tokens for each in choices if each.parser is not None)
        usage = usage_of(head, [generation.done for generation in generations if generation.done], reasoning)
        yield sse(kind(head.id, head.created, head.model, [], usage))
    yield END


def _with_prompt_ids(chunk: StreamedReply, head: Head, choice: StreamedChoice) -> StreamedReply:
    """Returns the chunk with the ids of the prompt's tokens if it is a chat's first chunk of this choice, and the ids
    are requested. Completions have them in their choices."""
    ids = head.prompt_ids_of(choice.index)
    if ids is None or not isinstance(chunk, openai.ChatChunk) or not _is_first(choice):
        return chunk
    return msgspec.structs.replace(chunk, prompt_token_ids=ids)


def _is_first(choice: StreamedChoice) -> bool:
    """Returns whether this is a choice of a chat's first chunk, which has the role."""
    return isinstance(choice, openai.ChunkChoice) and choice.delta.role is not None


class _StreamedChoices:
    """Builds the choices in the chunks of one generation."""

    def __init__(self, head: Head, index: int, generation: Generation) -> None:
        self._head, self._index, self._generation = head, index, generation
        self._is_begun = False
        self.parser = head.parser(index) if head.form is not None else None
        self.completed = 0
        """Number of completion tokens in the chunks up to the latest one."""

    def of(self, event: Token | Done) -> Iterator[StreamedChoice]:
        """Yields the choices that an event adds, one per chunk."""
        head, index = self._head, self._index
        if not self._is_begun:
            self._is_begun = True
            choice = _first_choice(head, index, self._generation.prompt_logprobs)
            if choice:
                yield choice
        if isinstance(event, Token):
            self.completed += len(event.token_ids)
            if self.parser is None:
                yield _token_choice(head, index, event)
            else:
                pieces = self.parser.feed(event.text, len(event.token_ids))
                token_ids = head.token_ids(event.token_ids)
                yield from _piece_choices(index, pieces, _chat_logprobs(head, event.logprobs), token_ids)
        else:
            self.completed = event.completion_tokens
            if self.parser is not None:
                yield from _piece_choices(index, self.parser.feed(event.text, 0, last=True))
            elif event.text:
                yield _token_choice(head, index, Token(event.text, [], event.completion_tokens))
            yield _last_choice(head, index, event, called=self.parser is not None and self.parser.calls > 0)


def failure(error: ServiceError, request_id: str) -> bytes:
    return sse(openai_body(error, request_id))


def finish_reason(done: Done) -> openai.FinishReason:
    """Returns OpenAI's finish reason. `cancelled` becomes `stop`, `timeout` becomes `length`."""
    return "stop" if done.finish_reason in ("stop", "cancelled") else "length"


def usage_of(head: Head, ends: Sequence[Done], reasoning_tokens: int = 0) -> openai.TokenUsage:
    """Returns the token usage of all choices together; each prompt counts once, however many choices it has.
    `reasoning_tokens`: those of the completion tokens that are reasoning, if it is separated."""
    separated = head.form is not None and head.form.reasoning
    details = openai.CompletionDetails(reasoning_tokens) if separated else msgspec.UNSET
    prompt = sum(done.prompt_tokens for done in ends[:: head.choices])
    completion = sum(done.completion_tokens for done in ends)
    cached = sum(done.cached_tokens for done in ends[:: head.choices])
    return openai.TokenUsage(prompt, completion, prompt + completion, openai.Details(cached), details)


def _usage_so_far(head: Head, generations: Sequence[Generation], completion: int) -> openai.TokenUsage:
    """Returns the token usage after `completion` tokens of all choices together. The number of cached tokens is not
    known yet and stays 0."""
    prompt = sum(len(generation.request.token_ids) for generation in generations[:: head.choices])
    return openai.TokenUsage(prompt, completion, prompt + completion, openai.Details(0))


def _first_choice(head: Head, index: int, scored: list[TokenLogprob]) -> StreamedChoice | None:
    """Returns the choice that is sent before the first token, or None."""
    if head.chat:
        return openai.ChunkChoice(index, openai.Delta(role="assistant", content=""), None, None)
    echo, prompt_ids = head.echo_of(index), head.prompt_ids_of(index)
    if echo is None:
        choice = openai.CompletionChoice(index, "", None, None, prompt_token_ids=prompt_ids)
        return choice if prompt_ids is not None else None
    logprobs = _completion_logprobs(head, _echoed_tokens(head, scored), echo)
    return openai.CompletionChoice(index, echo.text, None, logprobs, prompt_token_ids=prompt_ids)


def _token_choice(head: Head, index: int, event: Token) -> StreamedChoice:
    ids = head.token_ids(event.token_ids)
    if head.chat:
        delta = openai.Delta(content=event.text)
        return openai.ChunkChoice(index, delta, None, _chat_logprobs(head, event.logprobs), token_ids=ids)
    echo = head.echo_of(index)
    logprobs = _completion_logprobs(head, event.logprobs, begin=len(echo.text) if echo else 0)
    return openai.CompletionChoice(index, event.text, None, logprobs, token_ids=ids)


def _piece_choices(
    index: int,
    pieces: Sequence[AnswerPiece],
    logprobs: openai.ChatLogprobs | None = None,
    token_ids: list[int] | None = None,
) -> Iterator[openai.ChunkChoice]:
    """Yields the choices of the pieces of an answer. The log probabilities and the id of a token come
    with its first piece, and in a chunk of their own if it completes none."""
    deltas = [_delta(piece) for piece in pieces]
    if not deltas and (logprobs is not None or token_ids is not None):
        deltas = [openai.Delta()]
    for delta in deltas:
        yield openai.ChunkChoice(index, delta, None, logprobs, token_ids=token_ids)
        logprobs = token_ids = None


def _delta(piece: AnswerPiece) -> openai.Delta:
    match piece:
        case Text(text):
            return openai.Delta(content=text)
        case Reasoning(text):
            return openai.Delta(reasoning_content=text)
        case CallBegin(at, name, id):
            function = openai.FunctionDelta(name, "")
            return openai.Delta(tool_calls=[openai.CallDelta(at, function, id, "function")])
        case CallArguments(at, text):
            return openai.Delta(tool_calls=[openai.CallDelta(at, openai.FunctionDelta(arguments=text))])


def _last_choice(head: Head, index: int, done: Done, *, called: bool) -> StreamedChoice:
    reason = finish_reason(done)
    if called and reason == "stop":
        reason = "tool_calls"
    if head.chat:
        return openai.ChunkChoice(index, openai.Delta(), reason, None, done.stop_reason)
    return openai.CompletionChoice(index, "", reason, None, done.stop_reason)


def _chat_logprobs(head: Head, entries: Sequence[TokenLogprob]) -> openai.ChatLogprobs | None:
    if not head.logprobs:
        return None
    return openai.ChatLogprobs([_chat_logprob(entry) for entry in entries])


def _chat_logprob(entry: TokenLogprob) -> openai.ChatLogprob:
    tops = [openai.ChatTop(top.token, top.logprob, _bytes(top)) for top in entry.top]
    return openai.ChatLogprob(entry.token, entry.logprob, _bytes(entry), tops)


def _bytes(entry: TokenLogprob | TopLogprob) -> list[int] | None:
    """Returns the token's UTF-8 bytes; None for a part of a character of which the node does not know them."""
    if entry.part:
        return list(entry.part)
    return None if "\ufffd" in entry.token else list(entry.token.encode())


def _echoed_tokens(head: Head, scored: list[TokenLogprob]) -> list[TokenLogprob]:
    """Returns the prompt's tokens from the second on, each with as many alternatives as `logprobs` asks for."""
    if not (head.echo and head.logprobs):
        return []
    return [msgspec.structs.replace(entry, top=entry.top[: head.top_logprob_count]) for entry in scored]


def _completion_logprobs(
    head: Head, entries: Sequence[TokenLogprob], echo: Echo | None = None, *, begin: int = 0
) -> openai.CompletionLogprobs | None:
    """Returns the field `logprobs` of a completion; None if it was not requested.

    `echo`: the echoed prompt, in which case the entries begin with the prompt's second token. `begin`: characters of
    the text before the generated ones, if the entries are of generated tokens alone.
    """
    if not head.logprobs:
        return None
    tokens = [entry.token for entry in entries]
    logprobs: list[float | None] = [entry.logprob for entry in entries]
    tops: list[dict[str, float] | None] = [{top.token: top.logprob for top in entry.top} for entry in entries]
    offsets = [begin + entry.offset for entry in entries]
    if echo is not None:
        tokens, logprobs, tops = [echo.first_token, *tokens], [None, *logprobs], [None, *tops]
        generated = entries[len(echo.offsets) - 1 :]
        offsets = [*echo.offsets, *(len(echo.text) + entry.offset for entry in generated)]
    return openai.CompletionLogprobs(tokens, logprobs, tops, offsets)


def _prompt_logprobs(head: Head, outcome: Outcome) -> openai.PromptLogprobs | None:
    if not head.prompt_logprobs:
        return None
    return [None, *map(_by_id, outcome.prompt_logprobs)]


def _by_id(entry: TokenLogprob) -> dict[str, openai.RankedLogprob]:
    """Returns ranked logprobs by token id, as vLLM does.

    The prompt's actual token comes first, then the other most likely ones.
    """
    by_id = {str(entry.token_id): openai.RankedLogprob(entry.logprob, entry.rank, entry.token)}
    for rank, top in enumerate(entry.top, start=1):
        by_id.setdefault(str(top.token_id), openai.RankedLogprob(top.logprob, rank, top.token))
    return by_id
