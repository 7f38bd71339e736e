"""Every format: what it is read as, and where a malformed one is said to be wrong."""

from __future__ import annotations

import gzip
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from garnish.simulation.job import TraceRequest
from garnish.simulation.traces.lines import TraceError
from garnish.simulation.traces.read import FORMATS, read_trace
from garnish.simulation.traces.requests import TraceOptions

ROOT = Path(__file__).parents[3]
MAF = "HashOwner,HashApp,HashFunction,Trigger,1,2,3\no1,a,f,http,2,0,1\no2,a,g,timer,0,4,0\n"
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,0\n"
)
MOONCAKE = (
    '{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}\n'
    '{"timestamp": 1500, "input_length": 12, "output_length": 3, "hash_ids": []}\n'
)
SERVEGEN = (
    "client_id,timestamp_s,rate_rps,cv,pattern,param1,param2\n"
    "0,0,0.05,1.2,Weibull,0.4,0.4\n0,600,0,0,,0,0\n7,600,0.02,0.6,Gamma,3.1,0.36\n"
)
OWN = (
    '{"at": 1.5, "tenant": "t1", "function": "3f", "rank": 16, "prompt_tokens": 40, "output_tokens": 96}\n'
    '{"at": 0.0, "tenant": "t2", "function": "", "rank": 0, "prompt_tokens": 4, "output_tokens": 9, "bytes": 0}\n'
)


def read(tmp_path: Path, text: str, options: TraceOptions = TraceOptions()) -> tuple[str, list[TraceRequest]]:  # noqa: B008 - frozen
    file = tmp_path / "trace"
    file.write_text(text)
    return read_trace(file, options)


def test_maf(tmp_path: Path) -> None:
    form, found = read(tmp_path, MAF)
    assert form == "maf"
    assert Counter(request.function for request in found) == {"f0": 4, "f1": 3}
    assert Counter((request.function, int(request.at // 60)) for request in found) == {
        ("f0", 1): 4, ("f1", 0): 2, ("f1", 2): 1,
    }  # fmt: skip
    assert [request.at for request in found] == sorted(request.at for request in found)
    assert {request.tenant for request in found if request.function == "f0"} == {"t1"}
    assert all(request.prompt_tokens >= 1 and request.output_tokens >= 1 for request in found)
    assert read(tmp_path, MAF)[1] == found
    assert read(tmp_path, MAF, TraceOptions(seed=1))[1] != found


def test_maf_scaled(tmp_path: Path) -> None:
    _, found = read(tmp_path, MAF, TraceOptions(rate=20, functions=50, seconds=100, ranks=(4, 8)))
    assert len(found) == pytest.approx(20 * 100, rel=0.15)
    assert max(request.at for request in found) < 100
    assert {request.rank for request in found} == {4, 8}
    _, without = read(tmp_path, MAF, TraceOptions(skip_top=1))
    assert {request.function for request in without} == {"f0"}
    assert len(without) == 3


def test_halves_of_the_functions_share_none(tmp_path: Path) -> None:
    """The functions of one half are every second one by calls."""
    text = MAF.splitlines()[0] + "\n" + "".join(f"o{i},a{i},f{i},http,{2**i},0,0\n" for i in range(6))
    sizes = []
    for half in (0, 1):
        called = Counter(request.function for request in read(tmp_path, text, TraceOptions(half=half))[1])
        sizes.append(sorted(called.values()))
    assert sizes == [[2, 8, 32], [1, 4, 16]]


def test_shifted_functions_burst_in_minutes_of_their_own(tmp_path: Path) -> None:
    """Every one keeps the counts that it has, from another minute on."""
    text = MAF.splitlines()[0] + "\no,a,f,http,90,0,0\n"
    together, apart = (
        read(tmp_path, text, TraceOptions(functions=60, shifted=shifted))[1] for shifted in (False, True)
    )
    assert len(together) == len(apart) == 60 * 90
    assert max(request.at for request in together) < 60
    minutes = Counter(int(request.at // 60) for request in apart)
    assert set(minutes) == {0, 1, 2} and max(minutes.values()) < 40 * 90


def test_the_committed_maf_sample() -> None:
    file = ROOT / "benchmarks" / "data" / "azure_functions_2019_480min.csv.gz"
    form, found = read_trace(file, TraceOptions(seconds=600, rate=5.0))
    assert form == "maf"
    assert len(found) == pytest.approx(3000, rel=0.1)


def test_azure_llm(tmp_path: Path) -> None:
    form, found = read(tmp_path, AZURE)
    assert form == "azure_llm"
    assert [(request.prompt_tokens, request.output_tokens) for request in found] == [(374, 44), (396, 1)]
    assert found[1].at == pytest.approx(4.314579, abs=1e-5)
    assert read(tmp_path, AZURE, TraceOptions(rate=0.1))[1][1].at == pytest.approx(20)


def test_mooncake(tmp_path: Path) -> None:
    form, found = read(tmp_path, MOONCAKE)
    assert form == "mooncake"
    assert [(r.at, r.prompt_tokens, r.output_tokens) for r in found] == [(0.0, 6758, 500), (1.5, 12, 3)]


def test_servegen(tmp_path: Path) -> None:
    form, found = read(tmp_path, SERVEGEN)
    assert form == "servegen"
    assert Counter((r.function, r.tenant, int(r.at // 600)) for r in found) == {
        ("f0", "t0", 0): 30, ("f1", "t1", 1): 12,
    }  # fmt: skip


def test_own(tmp_path: Path) -> None:
    form, found = read(tmp_path, OWN)
    assert form == "garnish"
    assert found == [TraceRequest(0.0, "", 0, 4, 9, "t2"), TraceRequest(1.5, "3f", 16, 40, 96, "t1")]


def test_gzipped(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv.gz"
    file.write_bytes(gzip.compress(MAF.encode()))
    assert read_trace(file, TraceOptions()) == read(tmp_path, MAF)
    file.write_bytes(gzip.compress(MAF.encode())[:-20])
    with pytest.raises(TraceError, match="can't be read"):
        read_trace(file, TraceOptions())


@pytest.mark.parametrize(
    ("text", "line", "column", "problem"),
    [
        ("", 1, 0, "empty"),
        ("what,is,this\n", 1, 1, "not known"),
        (MAF.replace("4,0", "four,0"), 3, 16, "2: expected a number, found 'four'"),
        (MAF.replace("4,0", "-4,0"), 3, 16, "expected 0 to"),
        (MAF.replace("4,0", "4"), 3, 0, "expected 7 fields, found 6"),
        (MAF.splitlines()[0], 1, 0, "no function"),
        ("HashOwner,HashApp,HashFunction,Trigger\n", 1, 38, "no minute"),
        (MAF.replace("2,0,1", "0,0,0").replace("0,4,0", "0,0,0"), 1, 0, "no requests"),
        (AZURE.replace("2023-11-16 18:15:50", "yesterday"), 3, 1, "TIMESTAMP: expected a time"),
        (AZURE.replace("396", "1.5"), 3, 29, "ContextTokens: expected a number"),
        (MOONCAKE.replace('"output_length": 3', '"output_length": "3"'), 2, 41, "output_length: expected"),
        (MOONCAKE.replace("12,", "12"), 2, 40, "not JSON"),
        (MOONCAKE.replace('"input_length": 12, ', ""), 2, 1, "input_length is missing"),
        (MAF.replace("4,0", f"{'9' * 400},0"), 3, 16, "2: expected 0 to"),
        (AZURE.replace("396", "9" * 5000), 3, 29, "ContextTokens: expected a number"),
        (MOONCAKE.replace("12,", f"{'9' * 400},"), 2, 21, "input_length: expected 0 to"),
        (MOONCAKE.replace("12,", f"{'9' * 5000},"), 2, 1, "thousands of digits"),
        (MOONCAKE.replace("12,", f"{'[' * 100_000},"), 2, 1, "nested too deeply"),
        (SERVEGEN.replace("Gamma", "Pareto"), 4, 16, "pattern: expected"),
        (SERVEGEN.replace("0.05", "nan"), 2, 5, "rate_rps: expected"),
        (OWN.replace('"bytes": 0', '"size": 0'), 2, 96, "size: this field is not known"),
        (OWN.replace('"rank": 16', '"rank": true'), 1, 47, "rank: expected"),
        (OWN + "[1]\n", 3, 1, "expected an object"),
        (OWN.replace('"t2"', "7"), 2, 13, "tenant: expected text"),
    ],
)
def test_malformed(tmp_path: Path, text: str, line: int, column: int, problem: str) -> None:
    with pytest.raises(TraceError, match=problem) as caught:
        read(tmp_path, text)
    assert (caught.value.line, caught.value.column) == (line, column)
    place = f"trace:{line}:{column}:" if column else f"trace:{line}:"
    assert place in str(caught.value)


@given(st.sampled_from([MAF, AZURE, MOONCAKE, SERVEGEN, OWN]), st.data())
def test_damaged_traces_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, text: str, data: st.DataObject
) -> None:
    """Whatever a letter is exchanged for: there is a result, or an error that names a line of the file."""
    where = data.draw(st.integers(0, len(text) - 1))
    damaged = text[:where] + data.draw(st.sampled_from(list('x,"{}\n-9.\0é '))) + text[where + 1 :]
    try:
        form, found = read(tmp_path_factory.getbasetemp(), damaged, TraceOptions(seconds=1000))
    except TraceError as error:
        line = error.line
    else:
        line = 1
        assert form in FORMATS and found
    assert 1 <= line <= damaged.count("\n") + 2


@pytest.mark.parametrize("text", [AZURE, MOONCAKE, OWN])
def test_a_trace_of_more_requests_than_are_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    for module in ("requests", "read"):
        monkeypatch.setattr(f"garnish.simulation.traces.{module}.MAX_REQUESTS", 1)
    with pytest.raises(TraceError, match="more than 1 requests") as caught:
        read(tmp_path, text)
    assert caught.value.line == len(text.splitlines())


def test_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="can't be read"):
        read_trace(tmp_path / "nothing", TraceOptions())
    (tmp_path / "latin").write_bytes(b"\xe9\n")
    with pytest.raises(TraceError, match="UTF-8"):
        read_trace(tmp_path / "latin", TraceOptions())
