"""Autoscaling of pools.

`rounds` reads loads and sizes, `sizing` decides on new sizes, and a driver (`local` or `aws`) sets them. `garnish
autoscale` (garnish/autoscaling.py) provides the load from the gateway, and holds the lease that ensures that only one
autoscaler is active.
"""
