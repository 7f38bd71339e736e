"""Leader election, and the background jobs of the gateway worker that leads.

Each worker runs a `Leader`, which tries to hold a lease (in Redis, or in the object store without Redis). The holder
calls each job repeatedly, with a deadline. Jobs stay correct if two workers lead for a while.
"""
