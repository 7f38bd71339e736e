"""State shared by the workers of one gateway, in Redis or, with one worker, in memory.

It consists of messages (`peers`), sums over sliding windows (`windows`), and metrics that each worker counts.
"""
