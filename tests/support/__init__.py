"""What tests of several packages, and benchmarks, share: an engine in this process, PEFT as the reference, drawn cases,
servers of Redis and S3, and how many examples are drawn. Nothing here imports a benchmark."""
