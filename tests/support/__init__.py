"""What tests and benchmarks share: servers, processes, references and drawn inputs."""
