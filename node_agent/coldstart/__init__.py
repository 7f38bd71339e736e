"""Cold starts: how a request is served while its adapter is not on the device yet.

`wait` lets the pass stand until the whole adapter is there.
"""
