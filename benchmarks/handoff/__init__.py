"""Handoffs to CPU LoRA workers."""
