"""The service on a GPU host. Requests enter at `api`, cross one socket to `engine`, and tokens return the same way.

`supervisor` starts and restarts both processes; the engine process alone owns the device.
"""
