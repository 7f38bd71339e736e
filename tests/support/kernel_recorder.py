"""What launches of Triton kernels compile, for a GPU that need not be there: launchers run with their own arguments on
tensors anywhere, and nothing is launched. In a process whose Triton does not interpret."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.driver import driver

WARP = 32
OPTIONS = ("num_warps", "num_ctas", "num_stages", "enable_fp_fusion")


@dataclass(frozen=True)
class KernelLaunch:
    """One launch, as the just-in-time compiler sees it: launches of one key share a compiled kernel."""

    kernel: str
    key: str
    target: GPUTarget
    function: Any = field(repr=False)
    arguments: dict[str, Any] = field(repr=False)

    def compile(self) -> Any:
        """Returns Triton's CompiledKernel. Raises what Triton's compiler raises."""
        found = self.arguments
        source = ASTSource(self.function, found["signature"], found["constants"], found["configs"][0])
        return triton.compile(source, target=self.target, options={name: found[name] for name in OPTIONS})


class _AbsentGpu:
    """The part of a Triton driver that is asked before anything is launched."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_device(self) -> int:
        return self._capability  # compiled kernels are kept per device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, WARP)


@contextmanager
def recorded(capability: int) -> Iterator[list[KernelLaunch]]:
    """Within it kernels that are launched are recorded instead, as for sm_`capability`."""
    launches: list[KernelLaunch] = []
    target = GPUTarget("cuda", capability, WARP)

    def record(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        launches.append(KernelLaunch(fn.name.rpartition(".")[2], str(key), target, fn.jit_function, compile))
        return True  # don't compile, and so don't launch

    before = knobs.runtime.jit_cache_hook
    driver.set_active(_AbsentGpu(capability))
    knobs.runtime.jit_cache_hook = record
    try:
        yield launches
    finally:
        knobs.runtime.jit_cache_hook = before
        driver.set_active(None)  # whose turn it is is found anew
