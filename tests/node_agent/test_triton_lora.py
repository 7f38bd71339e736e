"""The engine with the Triton kernels, on Triton's interpreter where there is no GPU: the tokens of PEFT alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from kernels.decode import bgmv
from kernels.launch import Launch
from kernels.view import GroupView, KernelArgumentError
from node_agent.runner.lora import SegmentedLora
from node_agent.runner.triton_lora import TritonLora
from node_agent.types import LoraBatch
from tests.node_agent.adapter_world import loaded_lease
from tests.support.exact import Case, Tally, check
from tests.support.local_engine import LocalEngine, MakeEngine
from tests.support.peft_reference import ALL_TARGETS, PeftReference, make_adapter

SMALL = Launch(tokens=16, ranks=64, shrink_width=64, expand_width=256, splits=1, rank_programs=1)
"""Few programs: the interpreter runs one after the other."""

pytestmark = pytest.mark.usefixtures("quick_interpreter")
ADAPTERS = [
    {"r": 3, "target_modules": ["q_proj", "v_proj"]},
    {"r": 33, "target_modules": ["o_proj", "down_proj"], "use_rslora": True},
    {
        "r": 7,
        "target_modules": ALL_TARGETS,
        "rank_pattern": {"k_proj": 1, "up_proj": 19},
        "layers_to_transform": [1, 3],
    },
]


class Counted(TritonLora):
    """Says which launches it was asked for."""

    passes: ClassVar[Counter[tuple[str, str]]] = Counter()

    def add(self, view: GroupView, ys: Sequence[torch.Tensor], x: torch.Tensor, batch: LoraBatch, decode: bool) -> None:
        super().add(view, ys, x, batch, decode)
        mixed = len(set(batch.seg_slot.tolist())) > 1
        self.passes["decode" if decode else "prefill", "mixed" if mixed else "alone"] += 1


def with_triton(engine: LocalEngine, max_tokens: int = 24, kernel: str = "mbgmv") -> Counted:
    store = engine.engine.store
    lora = Counted(store, 8, max_tokens, SMALL, SMALL, kernel)
    lora.passes.clear()  # also those of the warm-up
    engine.engine.start_lora = lora.start
    return lora


@pytest.fixture(scope="module")
def odd_adapters(stories_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("odd")
    return [
        make_adapter(stories_dir, root / f"odd{i}", i, lora_alpha=16, **settings) for i, settings in enumerate(ADAPTERS)
    ]


def test_tokens_of_peft(make_engine: MakeEngine, odd_adapters: list[Path], reference: PeftReference) -> None:
    """Arrivals while others decode, a prompt of two chunks, a base row, a cold pass for each adapter."""
    engine = make_engine(chunk_tokens=24, max_rows=8)
    lora = with_triton(engine)
    kinds = [Case(path, engine.deploy(path), [], 0) for path in odd_adapters]
    kinds += [Case(None, None, [], 0), kinds[2]]
    cases, requests = [], []
    for i, kind in enumerate(kinds):
        case = Case(kind.directory, kind.adapter, [1, *range(20 + i, 24 + i if i else 50)], 4)
        cases.append(case)
        requests.append(engine.submit(case.prompt, case.max_tokens, case.adapter))
        engine.step()
    engine.run()
    tally = Tally()
    for case, request in zip(cases, requests, strict=True):
        assert not check(engine, reference, case, engine.outcomes[request].tokens, tally)
    assert tally.mismatches == 0
    assert {kind for kind, _ in lora.passes} == {"decode", "prefill"}
    assert lora.passes["decode", "mixed"] and lora.passes["prefill", "mixed"], lora.passes
    assert len({tuple(tokens) for tokens in engine.results(requests[:4])}) == 4, "the adapters change nothing"


def test_the_padded_kernel_adds_the_same(make_engine: MakeEngine, odd_adapters: list[Path]) -> None:
    """Rows of ranks 33 and 7, of which the second is padded, and a base row, against torch's products."""
    engine = make_engine(chunk_tokens=24, max_rows=8)
    lora, store = with_triton(engine, kernel="bgmv"), engine.engine.store
    leases = [loaded_lease(store, engine.deploy(path)) for path in odd_adapters[1:]]
    slots = torch.tensor([leases[0].slot, leases[1].slot, -1], dtype=torch.int32)
    starts = torch.arange(4, dtype=torch.int32)
    batch = LoraBatch(starts, slots, slots, [*leases, None], [(0, 1), (1, 2), (2, 3)], max_rank=33, empty=False)
    x, found = torch.randn(3, engine.base.widths[3][0], generator=torch.Generator().manual_seed(1)), []
    for run in (lora.start(batch, True), SegmentedLora(batch, store.weights)):
        found.append(torch.zeros(3, engine.base.widths[3][1]))
        assert run.begin(1, "o", x)
        run.finish(1, "o", found[-1:])
    assert lora.decode_kernel is bgmv and lora.passes["decode", "mixed"] == 1
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)
    assert found[0][:2].abs().amin(dim=1).max() > 0 and not found[0][2].any()
    for lease in leases:
        store.release(lease, [])


def test_a_group_that_nobody_adapts_is_not_launched(make_engine: MakeEngine, odd_adapters: list[Path]) -> None:
    engine = make_engine(chunk_tokens=24, max_rows=8)
    lora = with_triton(engine)
    engine.submit([1, 20, 21], 2, engine.deploy(odd_adapters[0]))
    engine.run()
    assert lora.passes == {("prefill", "alone"): 5, ("decode", "alone"): 5}  # q,k,v of five layers each


def test_a_base_batch_runs_none(make_engine: MakeEngine) -> None:
    engine = make_engine(chunk_tokens=24, max_rows=8)
    lora = with_triton(engine)
    engine.submit([1, 20, 21], 2)
    engine.run()
    assert not lora.passes


def test_a_pass_above_the_scratch_is_refused(make_engine: MakeEngine, odd_adapters: list[Path]) -> None:
    """Before anything is launched, with both sizes."""
    engine = make_engine(chunk_tokens=24, max_rows=8)
    lora = with_triton(engine, max_tokens=10)
    pool = engine.engine.store.pool.data
    ends = torch.tensor([0, 11], dtype=torch.int32)
    slots = torch.tensor([0], dtype=torch.int32)
    view, y = lora.groups[0]["o"], torch.zeros(11, 64)
    long = LoraBatch(ends, slots, slots.expand(11), [], [(0, 11)], max_rank=4, empty=False)
    with pytest.raises(KernelArgumentError, match=r"xa is \(1, 3, 10, 512\); at least \[1, 1, 11, 4\] is needed"):
        lora.add(view, [y], torch.zeros(11, 64, dtype=pool.dtype), long, False)
    high = LoraBatch(ends, slots, slots.expand(11), [], [(0, 11)], max_rank=513, empty=False)
    with pytest.raises(KernelArgumentError, match="largest rank is 513; the scratch xa has room for 512"):
        with_triton(engine, max_tokens=11).add(view, [y], torch.zeros(11, 64, dtype=pool.dtype), high, False)
    assert not y.any()
