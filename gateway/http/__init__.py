"""HTTP layer of the gateway.

A request enters through `boundary` (ids, errors, limit of concurrent requests). `bodies` or `multipart` reads its body.
Replies leave through `responses` or `event_stream`.
"""
