"""The front door: command line, serverless.yml loader and Python client."""
