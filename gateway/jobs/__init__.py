"""Durable jobs: work that the object store keeps, and that gateway workers claim, run and finish.

Events and batches are jobs. Each kind has its own record; this package has what they share.

- Record and markers (`job_store`). One record per job, changed by compare-and-swap on its etag. Empty marker objects
  list jobs without reading all records. Markers are written before the record needs them, and removed after.
- Claim. A worker writes itself into the record as holder. Of several that claim at once, one write succeeds.
- Lease. A worker that runs events rewrites one object for all of them (`events/workers/`). The holder of a batch
  rewrites the record, whose etag then changes (`clocks.ChangeWatch`).
- Poll (`poller`). Workers list jobs that are due, and begin them by fair share of tenants.
- Crash. A job whose holder died is claimed again, so it runs at least once. The earlier holder's next write fails.
"""
