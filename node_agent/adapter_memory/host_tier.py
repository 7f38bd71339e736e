"""The host tier: which adapters are in host memory, on the way to it, or leaving it. Used by the engine's thread alone.

Least recently used adapters go first. Pages come back only when no worker touches them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from cluster.messages import Adapter
from node_agent.adapter_memory.loader import HostAdapter, Loader
from node_agent.adapter_memory.pool import Pool


class HostTier:
    def __init__(self, pool: Pool, loader: Loader) -> None:
        self.pool, self._loader = pool, loader
        self._adapters: OrderedDict[str, HostAdapter] = OrderedDict()
        self._unfetched: list[HostAdapter] = []
        self._fetching: list[HostAdapter] = []
        self._leaving: list[HostAdapter] = []

    def find(self, digest: str) -> HostAdapter | None:
        return self._adapters.get(digest)

    def __iter__(self) -> Iterator[HostAdapter]:
        return iter(self._adapters.values())

    def announce(self, adapter: Adapter) -> HostAdapter:
        """The adapter's entry; its load starts, or starts again if it has failed."""
        host = self._adapters.get(adapter.digest)
        if host is not None and not host.failed:
            self._adapters.move_to_end(adapter.digest)
            return host
        if host is not None:
            self.drop(host)
        host = HostAdapter(adapter.digest, adapter.artifact)
        self._adapters[adapter.digest] = host
        self._unfetched.append(host)
        self._loader.measure(host)
        return host

    def waits(self, host: HostAdapter) -> bool:
        """Host memory has had no room for it yet."""
        return host in self._unfetched

    def drop(self, host: HostAdapter) -> None:
        """Forget it; its pages are free at once, or when its workers have ended."""
        if self._adapters.get(host.digest) is host:
            del self._adapters[host.digest]
        if host in self._unfetched:
            self._unfetched.remove(host)
        if host.pages is not None and host not in self._leaving:
            self._leaving.append(host)
        self._sweep()

    def poll(self) -> None:
        """Free what has been left, and fetch measured adapters, in order of announcement, while there is room."""
        self._sweep()
        waiting: list[HostAdapter] = []
        for host in self._unfetched:
            if host.failed or host.size > self.pool.size:
                continue
            pages = self._take(host) if host.layout is not None else None
            if pages is None:
                waiting.append(host)
                continue
            host.pages = pages
            self._fetching.append(host)
            self._loader.fetch(host)
        self._unfetched = waiting

    @property
    def leaving(self) -> int:
        return len(self._leaving)

    def owned(self) -> dict[str, list[HostAdapter]]:
        """Every adapter that has pages, by digest; an earlier attempt at one may still be leaving."""
        found: dict[str, list[HostAdapter]] = {}
        gone = [host for host in self._leaving if self._adapters.get(host.digest) is not host]
        for host in [*self._adapters.values(), *gone]:
            if host.pages is not None:
                found.setdefault(host.digest, []).append(host)
        return found

    def _take(self, host: HostAdapter) -> list[int] | None:
        """Pages for it, evicting whole adapters that no worker touches, least recently used first."""
        assert host.layout is not None  # measured
        need = host.layout.pages
        idle = [h for h in self._adapters.values() if h.complete and h.pages is not None and not h.touched]
        if need > self.pool.pages.free + sum(len(h.pages or ()) for h in idle):
            return None
        for victim in idle:
            if need <= self.pool.pages.free:
                break
            self.drop(victim)
        return self.pool.pages.take(need, host.digest)

    def _sweep(self) -> None:
        for host in [host for host in self._fetching if not host.fetching]:
            self._fetching.remove(host)
            if host.failed and host.pages is not None and host not in self._leaving:
                self._leaving.append(host)  # its entry stays, to tell whoever waits why
        for host in list(self._leaving):
            if not host.touched:
                self._leaving.remove(host)
                assert host.pages is not None  # else it would not be here
                self.pool.pages.give(host.pages, host.digest)
                host.pages = None
