"""The node's API process: HTTP towards the gateway, one socket towards the engine; it never waits on the device.

A request enters in `generate`, is checked by `request`, and crosses `engine_link`; `requests` keeps all that are in
flight, and `reply` makes the events that the gateway reads of what the engine says.
"""
