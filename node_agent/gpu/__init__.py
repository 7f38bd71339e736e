"""The GPU of a node, as NVML shows it: which one the node has, how it is, and whether it can still be used."""
