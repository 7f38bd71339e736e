"""The seam to a library's model code: `transformers_runner` walks a Hugging Face model layer by layer.

A StepBatch enters at `start`, stops between layers at `advance`, and leaves as sampled tokens at `finish`.
"""
