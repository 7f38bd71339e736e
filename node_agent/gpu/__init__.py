"""The GPU of a node by NVML: the claim of one, its state, and the faults that make it unusable."""
