"""LoRA operations shape by shape, GPU kernels compiled and counted, and tuned."""
