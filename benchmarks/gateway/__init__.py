"""Overhead of the gateway under streams, random keys and many nodes."""
