"""Files and batches on OpenAI's wire: calls that are sent as one file, and run when nodes have nothing else to do.

A batch's record in the object store holds its lease, its progress, and the names of what its replies lie in. Whoever
holds the lease writes it by compare-and-swap every second or so, which is also the lease's heartbeat: a gateway that
lost it notices at its next write.
"""
