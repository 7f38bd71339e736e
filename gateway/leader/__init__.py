"""Leader election, and background jobs of the gateway worker that leads.

Every worker runs a `Leader`. It tries to hold a lease (in Redis, or in the object store where there is no Redis); the
holder calls each job again and again, with a deadline. Jobs stay correct when two workers lead for a while.
"""
