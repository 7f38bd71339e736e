"""Traces of requests: `read` parses their formats, and `requests` draws values that a trace does not state."""
