"""Traces of requests: `read` tells their formats apart, and `requests` draws what they do not state."""
