"""Traces of requests, in the formats of others and in our own: a module each. `read` tells them apart."""
