"""HTTP as the gateway speaks it. A request enters through `boundary` (ids, errors, the bound on concurrent requests),
its body is read by `bodies` or `multipart`; replies leave through `responses` or `event_stream`."""
