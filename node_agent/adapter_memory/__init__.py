"""Adapters in host and device memory (docs/design/adapter-memory.md).

`store.AdapterStore.announce` starts a load, `acquire` leases a slot on the device, `release` gives it back. `loader`
moves bytes: `fetch` from the object store, or from `disk_cache`, to host memory (`host`), `device_copy` from there into
the device's `pool`, layer by layer, by `loader_threads`. `table` is what kernels read, `weights` the same as ready-made
views; `host_map` shows the host tier to other processes.
"""
