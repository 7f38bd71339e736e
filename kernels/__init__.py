"""Arithmetic of LoRA and of decoder layers on tensors, without I/O. `reference` has the LoRA operations in torch."""
