"""Iteration-level batching.

`loop.Engine.submit` takes a request in, `Engine.step` runs one iteration and returns events.

`scheduler` decides who enters the batch (`admission`) and what is computed, `batch` turns that into tensors, `runner`
computes, and `loop` books the outcome.
"""
