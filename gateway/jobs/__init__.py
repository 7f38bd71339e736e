"""Durable jobs: the object store keeps them, and gateway workers claim, run and finish them.

Events and batches are jobs. Each kind has its own record; this package contains what they share.
- Record and markers (`job_store`). Each job has a record, which is changed by compare-and-swap on its ETag. Empty
  marker objects list jobs without reading all records. Markers are written before the record needs them, and removed
  afterwards.
- Claim. A worker writes itself into the record as holder. If several claim a job at once, one write succeeds.
- Lease. A worker that runs events renews one lease for all of them by rewriting an object (`events/workers/`). The
  holder of a batch rewrites the batch's record, whose ETag then changes (`clocks.ChangeWatch`).
- Poll (`poller`). Workers list due jobs and start them.
- Fair share (`shares`). It chooses the tenant whose job, or whose call of a batch, starts next. `windows` adapts the
  number that runs at once to the tenant's limits.
- Crash. A job whose holder died is claimed again, so it runs at least once. The earlier holder's next write fails.
"""
