"""Parts that several studies share: reports, load generators, services, traces, S3, and the rule for figures."""
