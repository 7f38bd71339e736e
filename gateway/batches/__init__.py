"""Files and batches of OpenAI's API: calls that are sent as one file and run in spare capacity.

A batch's record in the object store contains its lease, its progress, and the names of its output's parts. The holder
of the lease writes the record by compare-and-swap every second or so, which renews the lease. A gateway that has lost
the lease notices at its next write.
"""
