"""Operators for LoRA and for decoder layers, on CPUs and GPUs. They do no I/O.

`reference` has the LoRA operations in plain torch.
"""
