"""LoRA arithmetic: tensors in, tensors out, no I/O. `reference` is the plain-torch meaning of every operation."""
