"""Traces of requests: `read` recognises their formats, and `requests` draws values that they do not state."""
