"""Fit of the performance model to a runner's passes."""
