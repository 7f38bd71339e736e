"""Iteration-level batching.

`loop.Engine.submit` accepts a request. `Engine.step` runs one iteration and returns events. `scheduler` decides which
requests enter the batch (`admission`) and which tokens are computed. `batch` builds the tensors, `runner` computes, and
`loop` records the results.
"""
