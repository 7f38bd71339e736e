"""Cold starts by default settings, over HTTP: services that say nothing of the node, and others that say one thing.

Each service is started by `garnish up` from a file with the base model, `node.simulate.link`, and, for a baseline
alone, `node.cold_start`: `full` does not set it, `pipeline` and `assist` set it to their name, `overlap` to `wait`.
`pipeline_again` is a second service like `pipeline`, and shows by how much processes differ. All files set the same
`node.adapter_memory`, smaller than the default. What is called lies in the host memory of every node and on no
device, as the nodes say before each call. `cached` has the file of `full`; each of its adapters is called before its
call is timed. The services of one ratio run side by side. Each measures its link and workers while the others are
idle, and has the costs of its passes from the service without simulation, which starts first. Rounds of calls precede
the timed ones; after each, no service is called until all nodes have ended their measurements. Every call goes to all
services, in an order that is drawn each time; ratios are of such pairs. Prompts are drawn token ids; answers are
greedy and have 12 tokens.

Parts:

- `a`: a link of 20 MB/s and no other key: the CPU workers, and cold calls of rank 64 with prompts of 64 tokens.
- `b`: single calls at a load : prefill ratio of 0.68 and 0.17: a rank-64 adapter on q, k, v reaches the device in this
  share of a warm prefill of 256 tokens, which is the time to the first token on a service without simulation.
- `c`: bursts of 1, 4 and 8 calls at once, each with another adapter, at the same ratios.
- `d`: decoding alone, adapter on the device, with the link of `a`: a service that says no more, and two alike with
  `cpu_workers: 0`; tokens/s of one caller and of eight. All have the same single function, and start twice. The second
  of the two that are alike shows by how much processes differ.
- `e`: no simulation: the CPU workers, and the reason for their number. This part is in every run.

A call counts if its adapter was in host memory (`cached`: on the device) when it arrived; a burst if all its calls do.
`refused` is the number of calls that do not count. Intervals are 95 %, by a bootstrap over pairs. A figure that names
a part and a ratio, but no column, is of the pairs of all columns. One that names neither is the median over columns,
and its `_upper` the highest upper end of any column. With `--json FILE` the report is written after each part of a
ratio. A later run with the same FILE keeps the parts that it does not run again, if commit, machine, seed and sizes are
the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.coldstart.calls import CACHED, CALL_COLUMNS, Column, Draw, rounds
from benchmarks.coldstart.decode import DECODE_WAYS, WORKERS, decode_rows
from benchmarks.coldstart.figures import FULL, figures_of
from benchmarks.coldstart.services import FILE_ITEM_BYTES, Adapters, node_of, running, until_idle
from benchmarks.common.http_service import COSTS, HttpService
from benchmarks.common.invoke import Caller, check
from benchmarks.common.load import Planned, open_session
from benchmarks.common.report import SMOLLM2, arguments, contention_probe, report, run_study, save

WAYS = {
    FULL: {},
    "pipeline": {"cold_start": "pipeline"},
    "pipeline_again": {"cold_start": "pipeline"},
    "overlap": {"cold_start": "wait"},
    "assist": {"cold_start": "assist"},
    CACHED: {},
}
LINK_RANK, LINK_TOKENS = 64, 256
PREFILLS = 9
SLOW_LINK = "20MB/s"
SLOW = {"simulate": f"{{link: {SLOW_LINK}}}"}
NO_WORKERS = {"cpu_workers": "0"}
S3 = Column("S3", 64, 64)
PARTS = "abcde"
PLAIN = "plain"
RATIOS = (0.68, 0.17)
"""Load : prefill ratios of the papers' 3.3 GB/s and of a link four times as fast."""


@dataclass(frozen=True)
class Sizes:
    warm_rounds: int = 3
    """Rounds before the timed ones, from which nodes learn which kinds of calls to measure while they are idle."""
    rounds: int = 50
    burst_rounds: int = 25
    starts: int = 2
    """Starts of the services of part d."""
    alternations: int = 10
    """Alternations of one start."""
    columns: tuple[Column, ...] = (Column("S1", 32, 64), Column("S3", 64, 16), S3, Column("S3", 64, 256))
    burst_column: Column = S3
    bursts: tuple[int, ...] = (1, 4, 8)
    ways: tuple[str, ...] = tuple(WAYS)
    adapters: tuple[tuple[int, int], ...] = ((64, 48), (32, 24))
    room: int = 10
    """Adapters of rank 64 that fit on the device."""
    tokens: int = 12
    slow_calls: int = 5
    decode_tokens: int = 64
    quick: bool = False


QUICK = Sizes(
    0,
    2,
    1,
    1,
    2,
    (Column("S3", 64, 16),),
    Column("S3", 64, 16),
    (2,),
    ("full", "pipeline"),
    ((64, 8),),
    2,
    4,
    2,
    8,
    True,
)


class Study:
    """Rows by (part, ratio), in `done`, and what was measured for all of them, in `measured`."""

    def __init__(self, root: Path, model: Path, sizes: Sizes, seed: int, before: dict[str, Any]) -> None:
        """`before`: an earlier report of the same commit and machine, or nothing."""
        self._root, self._sizes, self._seed = root, sizes, seed
        self._adapters = Adapters(model, root / "adapters", dict(sizes.adapters), seed)
        self.done: dict[tuple[str, float | None], list[dict[str, Any]]] = {}
        for row in before.get("rows", ()):
            self.done.setdefault((row["part"], row.get("ratio")), []).append(row)
        self.measured: dict[str, Any] = before.get("settings", {}).get("measured", {})

    def run(self, parts: Sequence[str], ratios: Sequence[float]) -> Iterator[None]:
        """Yields after each part of a ratio."""
        self._plain()
        yield
        for part, measure in (("a", self._slow), ("d", self._decoding)):
            if part in parts:
                measure()
                yield
        for ratio in ratios:
            if {*parts} & {"b", "c"}:
                yield from self._ratio(parts, ratio)

    def _plain(self) -> None:
        """Part e, and what the others need: the costs of passes, and what the link's rate follows from, unless an
        earlier run measured that."""
        functions = self._adapters.of_rank[LINK_RANK][:1]
        with self._service(PLAIN, functions) as service:
            node = node_of(service)
            self.done["e", None] = [{"part": "e", "cpu_workers": node.cpu_workers, "reason": node.reason}]
            if not self.measured:
                size = self._adapters.file_bytes(LINK_RANK) * node.itemsize // FILE_ITEM_BYTES
                self.measured = {"adapter_bytes": size, "prefill_s": asyncio.run(self._prefill(service, functions[0]))}
        report_progress(f"{self.measured}; without simulation {node.cpu_workers} workers: {node.reason}")

    async def _prefill(self, service: HttpService, function: int) -> float:
        draw = Draw({}, self._adapters.vocabulary, self._seed)
        ttfts = []
        async with open_session(service.key) as session:
            call = Caller(session, service.url, [], max_tokens=1)
            for _ in range(PREFILLS + 1):
                answer = await call(Planned(f"a{function}", draw.prompt(LINK_TOKENS)))
                check([answer])
                ttfts.append(answer.ttft)
        return median(ttfts[1:])

    def _slow(self) -> None:
        """Part a: more adapters than the device has room for by default, for the file says nothing of it."""
        with self._service("slow", self._adapters.of_rank[LINK_RANK], **SLOW) as service:
            node = node_of(service)
            report_progress(f"at {SLOW_LINK} {node.cpu_workers} workers: {node.reason}")
            column = replace(self._sizes.burst_column, rank=LINK_RANK)
            cells = asyncio.run(self._called({FULL: service}, [(column, 1)], self._sizes.slow_calls))
            (calls,) = cells.values()
            row = {"part": "a", "cpu_workers": node.cpu_workers, "reason": node.reason}
            self.done["a", None] = [{**row, "columns": CALL_COLUMNS, "calls": calls}]

    def _decoding(self) -> None:
        """Part d: each start begins in the reverse order of the one before."""
        sizes, rows = self._sizes, list[dict[str, Any]]()
        (function,) = functions = self._adapters.of_rank[LINK_RANK][:1]
        for start in range(sizes.starts):
            with ExitStack() as stack:
                services: dict[str, HttpService] = {}
                for mode in DECODE_WAYS[:: -1 if start % 2 else 1]:
                    node = SLOW if mode == WORKERS else SLOW | NO_WORKERS
                    services[mode] = stack.enter_context(self._service(f"{mode}-{start}", functions, **node))
                    if not sizes.quick:
                        asyncio.run(until_idle(services.values()))
                workers = {mode: node_of(service).cpu_workers for mode, service in services.items()}
                report_progress(f"decoding alone, start {start}, CPU workers: {workers}")
                rounds_of_start = range(start * sizes.alternations, (start + 1) * sizes.alternations)
                rows += asyncio.run(
                    decode_rows(
                        services, function, self._adapters.vocabulary, rounds_of_start, sizes.decode_tokens, self._seed
                    )
                )
        self.done["d", None] = rows

    def _ratio(self, parts: Sequence[str], ratio: float) -> Iterator[None]:
        """Parts b and c, on the same services."""
        sizes, size = self._sizes, self.measured["adapter_bytes"]
        rate = round(size / (ratio * self.measured["prefill_s"]))
        node = {"simulate": f"{{link: {rate}B/s}}", "adapter_memory": str(sizes.room * size * 11 // 10)}
        functions = [i for numbers in self._adapters.of_rank.values() for i in numbers]
        singles = [(column, 1) for column in sizes.columns]
        bursts = [(sizes.burst_column, count) for count in sizes.bursts]
        with ExitStack() as stack:
            services: dict[str, HttpService] = {}
            for mode in sizes.ways:
                services[mode] = stack.enter_context(self._service(f"{mode}-{ratio}", functions, **node, **WAYS[mode]))
                if not sizes.quick:
                    asyncio.run(until_idle(services.values()))
            nodes = {mode: node_of(service) for mode, service in services.items()}
            for mode, node_record in nodes.items():
                report_progress(f"ratio {ratio}, {mode}: {node_record.cpu_workers} workers: {node_record.reason}")
            for part, columns, count in (("b", singles, sizes.rounds), ("c", bursts, sizes.burst_rounds)):
                if part in parts:
                    cells = asyncio.run(self._called(services, columns, count))
                    later = {mode: node_of(service).cpu_workers for mode, service in services.items()}
                    self.done[part, ratio] = [
                        {
                            "part": part, "ratio": ratio, "way": mode, **asdict(column), "at_once": at_once,
                            "link_bytes_s": rate, "cpu_workers": nodes[mode].cpu_workers, "reason": nodes[mode].reason,
                            "cpu_workers_after": later[mode], "columns": CALL_COLUMNS, "calls": calls,
                        }
                        for (mode, column, at_once), calls in cells.items()
                    ]  # fmt: skip
                    yield

    async def _called(
        self, services: dict[str, HttpService], columns: Sequence[tuple[Column, int]], count: int
    ) -> dict[tuple[str, Column, int], list[str]]:
        """Returns all calls as text, by mode, column and calls at once."""
        draw = Draw(self._adapters.of_rank, self._adapters.vocabulary, self._seed)
        cells: dict[tuple[str, Column, int], list[str]] = {(mode, *each): [] for each in columns for mode in services}
        ended = 0
        async for called in rounds(
            services,
            self._adapters.numbers,
            columns,
            draw,
            warm=self._sizes.warm_rounds,
            count=count,
            tokens=self._sizes.tokens,
        ):
            for mode, column, at_once, calls in called:
                cells[mode, column, at_once] += [call.text() for call in calls]
            ended += 1
            if ended % 10 == 0:
                report_progress(f"{ended} of {count} rounds")
        return cells

    def _service(self, name: str, functions: Sequence[int], **node: str) -> Any:
        report_progress(f"service {name} starts: {node}")
        costs = self._root / PLAIN / COSTS
        return running(
            self._root / name,
            self._adapters,
            functions,
            costs if costs.exists() else None,
            quick=self._sizes.quick,
            **node,
        )


def report_progress(text: str) -> None:
    """Report progress; the figures alone go to standard output."""
    print(text, file=sys.stderr, flush=True)


def _before(file: Path | None, now: dict[str, Any]) -> dict[str, Any]:
    """Returns the report in `file`, which this run continues; {} if there is none. `now`: an empty report of this run.

    Raises ValueError if it is of another commit, machine, seed or settings.
    """
    if file is None or not file.exists():
        return {}
    before: dict[str, Any] = json.loads(file.read_text())
    for name in ("study", "commit", "machine", "seed"):
        if before.get(name) != now[name]:
            raise ValueError(f"{file} has another {name}, {before.get(name)}, not {now[name]}: name another file")
    if before["settings"]["sizes"] != json.loads(json.dumps(now["settings"]["sizes"])):
        raise ValueError(f"{file} has other sizes: name another file")
    return before


def study(options: argparse.Namespace, root: Path) -> dict[str, Any]:
    sizes = QUICK if options.quick else _sizes(options)
    settings: dict[str, Any] = {
        "model": options.model.name, "sizes": asdict(sizes), "slow_link": SLOW_LINK, "quick": options.quick,
        "link_rank": LINK_RANK, "link_tokens": LINK_TOKENS, "files": {mode: WAYS[mode] for mode in sizes.ways},
    }  # fmt: skip
    document = report("coldstart_default", settings, options.seed, [], {}, simulated=True)
    before = _before(options.json, document)
    measured_study = Study(root, options.model, sizes, options.seed, before)
    probes = [*before.get("settings", {}).get("probes_ms", ()), contention_probe()]
    for _ in measured_study.run(options.parts, options.ratios):
        rows = [row for key in sorted(measured_study.done, key=str) for row in measured_study.done[key]]
        probes.append(contention_probe())
        document |= {
            "settings": settings | {"measured": measured_study.measured, "probes_ms": probes},
            "rows": rows,
            "figures": {name: round(value, 4) for name, value in figures_of(rows, options.seed).items()},
        }
        save(document, options.json)
    return document


def _sizes(options: argparse.Namespace) -> Sizes:
    return Sizes(
        rounds=options.rounds,
        burst_rounds=options.burst_rounds,
        alternations=options.alternations,
        ways=tuple(options.ways),
    )


def main() -> None:
    parser = arguments(__doc__ or "", SMOLLM2)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), help="all; with --quick b; e always")
    parser.add_argument("--ratios", nargs="+", type=float, default=None, help="load : prefill; 0.68 and 0.17")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), help="of parts b and c; all")
    parser.add_argument("--rounds", type=int, default=Sizes.rounds, help="single calls of a mode and column")
    parser.add_argument("--burst-rounds", type=int, default=Sizes.burst_rounds)
    parser.add_argument(
        "--alternations", type=int, default=Sizes.alternations, help="of decoding alone, for each start"
    )
    options = parser.parse_args()
    options.parts = options.parts or (["b"] if options.quick else list(PARTS))
    options.ratios = options.ratios or ([RATIOS[0]] if options.quick else list(RATIOS))
    run_study(study, options)


if __name__ == "__main__":
    main()
