"""Adapters in host and device memory (docs/design/adapter-memory.md).

`store.AdapterStore.announce` starts a load, `acquire` leases a slot on the device, and `release` ends the lease.
`loader` moves bytes layer by layer with `loader_threads`: `fetch` reads from the object store or `disk_cache` into host
memory (`host`), and `device_copy` copies from there into the device's `pool`. Kernels read `table`; `weights` has the
same data as views. `host_map` exports the host tier to other processes.
"""
