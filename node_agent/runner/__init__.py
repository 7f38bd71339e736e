"""Runners: the interface to a library's model code. `transformers_runner` calls a Hugging Face model layer by layer.

A pass takes a StepBatch at `start`, computes layers at `advance`, and returns sampled tokens at `finish`.
"""
