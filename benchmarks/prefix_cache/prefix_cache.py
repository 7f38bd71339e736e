"""Calls that begin as earlier ones did, over HTTP, with `node.prefix_cache` `auto` and `off`.

Two services of one base, each with one adapter of rank 16 on q, k, v, run side by side; both have measured their
performance models before the first call. Each round draws its calls, and makes them to both services, in an order
that alternates. Answers have 16 tokens; base and adapter are asked in turn.

- `first`, `later`: a text of this many words, then calls that have it before their own question of 12 words.
- `turn`: a conversation: each call has all questions and answers before it. Its first turn is not counted.
- `crowd`: sixteen such calls with one text, by eight callers at once, when a first one has been answered.
- `apart`: twenty-four calls by eight callers that share nothing: what the cache costs where it brings nothing.

`over`: of the time to the first token (`crowd`: its 90th percentile; `apart`: its median), `auto` over `off`, by round.
`tok_s_over`: of tokens/s, likewise. `texts_apart`: answers that are not the same with and without.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.common.adapters import make_adapters
from benchmarks.common.http_service import HttpService
from benchmarks.common.invoke import Answer, Caller, check, make_prompt, until_measured
from benchmarks.common.latency import summary
from benchmarks.common.load import Planned, closed_loop, open_session, plan
from benchmarks.common.report import SMOLLM2, ContentionProbe, arguments, report, run_study

WAYS = ("off", "auto")
RANK, TOKENS, QUESTION_WORDS, CALLERS = 16, 16, 12, 8


@dataclass(frozen=True)
class Sizes:
    rounds: int = 4
    lengths: tuple[int, ...] = (128, 512, 1024)
    """Words of a text that calls share."""
    later: int = 4
    turns: int = 6
    crowd_words: int = 512
    crowd: int = 16
    apart: int = 24
    apart_words: int = 128


QUICK = Sizes(1, (48,), 2, 3, 32, 4, 4, 8)


class Drawn:
    """Texts of a round, the same for both services."""

    def __init__(self, seed: int) -> None:
        self._seed = seed * 1000

    def text(self, words: int) -> str:
        self._seed += 1
        return make_prompt(words, self._seed)


class Round:
    """A round of calls to one service. `texts`: all its answers."""

    def __init__(self, call: Caller, models: Sequence[str], sizes: Sizes, seed: int) -> None:
        self._call, self._models, self._sizes, self._drawn, self._seed = call, models, sizes, Drawn(seed), seed
        self.texts: list[str] = []

    async def rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for model in self._models:
            for words in self._sizes.lengths:
                shared = self._drawn.text(words)
                answers = [await self._ask(model, shared) for _ in range(1 + self._sizes.later)]
                rows.append({"part": "first", "model": model, "words": words, **_ttft_columns(answers[:1])})
                rows.append({"part": "later", "model": model, "words": words, **_ttft_columns(answers[1:])})
            rows.append({"part": "turn", "model": model, **_ttft_columns((await self._talk(model))[1:])})
            rows.append({"part": "crowd", "model": model, **await self._crowd(model)})
        planned = plan(self._models, self._sizes.apart, self._sizes.apart_words, self._seed)
        return [*rows, {"part": "apart", "model": "both", **await self._together(planned)}]

    async def _ask(self, model: str, before: str) -> Answer:
        answer = await self._call(Planned(model, f"{before} {self._drawn.text(QUESTION_WORDS)}"))
        check([answer])
        self.texts.append(answer.text)
        return answer

    async def _talk(self, model: str) -> list[Answer]:
        said, answers = "", list[Answer]()
        for _ in range(self._sizes.turns):
            said += self._drawn.text(4 * QUESTION_WORDS)
            answer = await self._call(Planned(model, said))
            check([answer])
            answers.append(answer)
            self.texts.append(answer.text)
            said += answer.text
        return answers

    async def _crowd(self, model: str) -> dict[str, Any]:
        shared = self._drawn.text(self._sizes.crowd_words)
        await self._ask(model, shared)
        questions = [self._drawn.text(QUESTION_WORDS) for _ in range(self._sizes.crowd)]
        return await self._together([Planned(model, f"{shared} {question}") for question in questions])

    async def _together(self, planned: Sequence[Planned]) -> dict[str, Any]:
        samples = await closed_loop(self._call, planned, CALLERS)
        answers = [sample for sample in samples if isinstance(sample, Answer)]
        check(answers)
        self.texts += [answer.text for answer in answers]
        return {"cached": sum(answer.cached_tokens for answer in answers), **summary(answers)}


def _ttft_columns(answers: Sequence[Answer]) -> dict[str, Any]:
    ttft = [answer.ttft * 1e3 for answer in answers]
    tokens = {"prompt_tokens": sum(a.prompt_tokens for a in answers), "cached": sum(a.cached_tokens for a in answers)}
    return {"ttft_p50_ms": median(ttft), "ttft_max_ms": max(ttft), **tokens}


async def run_rounds(services: dict[str, HttpService], sizes: Sizes, seed: int) -> tuple[list[dict[str, Any]], int]:
    """Returns all rows, and how many texts of the two services differ."""
    rows: list[dict[str, Any]] = []
    apart = 0
    for number in range(-1, sizes.rounds):  # the first warms up
        texts: dict[str, list[str]] = {}
        for mode in WAYS if number % 2 else reversed(WAYS):
            service = services[mode]
            async with open_session(service.key) as session:
                call = Caller(session, service.url, [], max_tokens=TOKENS)
                asked_round = Round(call, (service.base, "a0"), sizes, seed + 1 + number)
                rows_of_round = await asked_round.rows()
            texts[mode] = asked_round.texts
            rows += [{"round": number, "way": mode, **row} for row in rows_of_round if number >= 0]
        if number >= 0:
            apart += sum(ours != theirs for ours, theirs in zip(*texts.values(), strict=True))
    return rows, apart


TIME = {"crowd": "ttft_p90_ms"}


def ratios(rows: Sequence[dict[str, Any]], of: Callable[[dict[str, Any]], float]) -> dict[str, list[float]]:
    """Returns ratios of auto to off, by part, of each round, words and model."""
    by_way = {mode: [row for row in rows if row["way"] == mode] for mode in WAYS}
    by_part: dict[str, list[float]] = {}
    for row in by_way["auto"]:
        key = [row[name] for name in ("round", "part", "model")] + [row.get("words")]
        (without_cache,) = (
            each
            for each in by_way["off"]
            if [each[name] for name in ("round", "part", "model")] + [each.get("words")] == key
        )
        name = f"{row['part']}_w{row['words']}" if "words" in row else row["part"]
        by_part.setdefault(name, []).append(of(row) / of(without_cache))
    return by_part


def figures_of(rows: Sequence[dict[str, Any]], apart: int) -> dict[str, float]:
    figures: dict[str, float] = {"texts_apart": apart}
    for name, values in ratios(rows, lambda row: row[TIME.get(row["part"], "ttft_p50_ms")]).items():
        figures |= {f"over_{name}": median(values), f"over_{name}_max": max(values)}
    rates = [row for row in rows if "tok_s" in row]
    for name, values in ratios(rates, lambda row: row["tok_s"]).items():
        figures |= {f"tok_s_over_{name}": median(values), f"tok_s_over_{name}_min": min(values)}
    return figures


def study(options: Any, root: Path) -> dict[str, Any]:
    sizes, model = QUICK if options.quick else Sizes(), options.model
    adapters = make_adapters(model, root / "adapters", [RANK], options.seed, dtype=torch.bfloat16)
    probe = ContentionProbe()
    with ExitStack() as stack:
        services = {
            mode: stack.enter_context(HttpService(model, adapters, root / mode, options.dtype, 0, prefix_cache=mode))
            for mode in WAYS
        }
        if not options.quick:  # one that is idle would measure while the other is called
            for service in services.values():
                asyncio.run(until_measured(service))
        rows, apart = asyncio.run(run_rounds(services, sizes, options.seed))
    settings = {
        "model": model.name, "dtype": options.dtype, "rank": RANK, "tokens": TOKENS, "callers": CALLERS,
        "quick": options.quick, **vars(sizes), **probe.values(),
    }  # fmt: skip
    return report("prefix_cache", settings, options.seed, rows, figures_of(rows, apart))


def main() -> None:
    parser = arguments(__doc__ or "", SMOLLM2)
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto")
    options = parser.parse_args()
    run_study(study, options)


if __name__ == "__main__":
    main()
