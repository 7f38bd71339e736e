"""A device's queue that runs late, and a watch over what the host does meanwhile: what a GPU would punish fails here.

Copies and captured work are recorded when they are enqueued and run when somebody waits for what lies behind them. So
a result that is read too early, or a batch that is overwritten too early, gives wrong tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from node_agent.runner.cuda_stream import Stream, Work

WAITS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.lift_fresh.default,
    torch.ops.aten._unique2.default,
    torch.ops.aten.repeat_interleave.Tensor,
}
"""Operations that bring a value from the device to the host, have a size that only the device knows, or bring a value
from memory of the host that is not pinned."""
BOOLEAN = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default}


class Capturing(TorchDispatchMode):
    """Refuses what could not be captured."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in WAITS:
            raise AssertionError(f"{func} in captured work")
        if func in BOOLEAN and any(index is not None and index.dtype is torch.bool for index in args[1]):
            raise AssertionError(f"{func} by booleans in captured work")
        return func(*args, **(kwargs or {}))


class Watching(TorchDispatchMode):
    """Refuses whatever touches the device's memory but through the stream."""

    def __init__(self, stream: LateStream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for leaf in () if func.is_view else tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() in self._stream.owned:
                raise AssertionError(f"{func} on the device's memory, outside the stream")
        return func(*args, **(kwargs or {}))


class LateEvent:
    def __init__(self, stream: LateStream, until: int) -> None:
        self._stream, self._until = stream, until

    def query(self) -> bool:
        return self._stream.ran >= self._until

    def synchronize(self) -> None:
        if self._stream.ran < self._until:
            self._stream.log.append("wait")
            self._stream.run(self._until)

    def wait(self) -> None:
        return None


class LateStream(Stream):
    """A Stream. `log` has what was enqueued and awaited. Before `late` is set everything runs at once."""

    def __init__(self) -> None:
        self.late = False
        self.log: list[str] = []
        self.ran = 0
        self._queue: deque[Work] = deque()
        self._kept: list[torch.Tensor] = []
        self.owned: set[int] = set()
        """addresses of the device's memory"""

    def host(self, size: int) -> torch.Tensor:
        self._log("allocate host")
        return super().host(size)

    def empty(self, size: int) -> torch.Tensor:
        self._log("allocate device")
        found = super().empty(size)
        self.own(found)
        return found

    def own(self, *tensors: torch.Tensor) -> None:
        """They are the device's memory. It is kept, so that no other gets its address."""
        self._kept += tensors
        self.owned.update(tensor.untyped_storage().data_ptr() for tensor in tensors)

    def upload(self, device: torch.Tensor, host: torch.Tensor, size: int) -> None:
        self._enqueue("upload", lambda: Stream.upload(self, device, host, size))

    def download(self, host: torch.Tensor, device: torch.Tensor, size: int) -> None:
        self._enqueue("download", lambda: Stream.download(self, host, device, size))

    def enqueue(self, work: Work) -> None:
        self._enqueue("work", work)

    def capture(self, work: Work) -> Work:
        with Capturing():
            work()
        return lambda: self._enqueue("captured", work)

    def event(self) -> LateEvent:
        return LateEvent(self, self.ran + len(self._queue))

    def run(self, until: int) -> None:
        with _disable_current_modes(), torch.inference_mode():
            while self.ran < until:
                self._queue.popleft()()
                self.ran += 1

    @contextmanager
    def running_late(self) -> Iterator[None]:
        self.late = True
        self.log.clear()
        try:
            with Watching(self):
                yield
        finally:
            self.run(self.ran + len(self._queue))
            self.late = False

    def _enqueue(self, what: str, work: Work) -> None:
        self._log(what)
        self._queue.append(work)
        if not self.late:
            self.run(self.ran + 1)

    def _log(self, what: str) -> None:
        if self.late:
            self.log.append(what)


class SlowStream(LateStream):
    """A LateStream for whole runs: captured steps run late, by an operation whenever somebody asks how far the device
    is. Passes that are not captured wait for it, for on a CPU they compute at once."""

    def __init__(self) -> None:
        super().__init__()
        self._lasting: set[int] = set()
        """addresses of the buckets' memory"""

    def empty(self, size: int) -> torch.Tensor:
        found = super().empty(size)
        if not self.late:
            self._lasting.add(found.data_ptr())
        return found

    def upload(self, device: torch.Tensor, host: torch.Tensor, size: int) -> None:
        super().upload(device, host, size)
        self._catch_up(device)

    def download(self, host: torch.Tensor, device: torch.Tensor, size: int) -> None:
        super().download(host, device, size)
        self._catch_up(device)

    def event(self) -> SlowEvent:
        return SlowEvent(self, self.ran + len(self._queue))

    def _catch_up(self, device: torch.Tensor) -> None:
        if device.data_ptr() not in self._lasting:
            self.run(self.ran + len(self._queue))


class SlowEvent(LateEvent):
    def query(self) -> bool:
        if not super().query():
            self._stream.run(self._stream.ran + 1)
        return super().query()
