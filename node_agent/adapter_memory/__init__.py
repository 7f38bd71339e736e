"""Adapters in host and device memory (docs/adapter-memory.md).

`store.AdapterStore.announce` starts a load, `acquire` leases a slot on the device, `release` gives it back. `loader`
moves bytes from the object store to host memory and from there into `pool`; `table` is what kernels read, `weights` the
same as ready-made views.
"""
