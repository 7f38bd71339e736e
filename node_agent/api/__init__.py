"""The node's API process: HTTP to the gateway, one socket to the engine. It never waits for the device.

A request enters in `generate`, is checked by `request`, and is sent through `engine_link`. `requests` tracks all
requests in flight. `reply` converts the engine's events into those for the gateway.
"""
