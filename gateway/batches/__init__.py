"""Files and batches on OpenAI's wire: calls that are sent as one file, and run in spare capacity.

A batch's record in the object store has its lease, its progress, and the names of the parts of its output. The holder
of the lease writes the record by compare-and-swap every second or so, which is also the lease's heartbeat: a gateway
that lost it notices at its next write.
"""
