"""Performance model of a node with vLLM. Dummy requests and dummy adapters go through vLLM as callers' do, and a model
is fitted to the times of vLLM's steps. `idle` measures while nobody calls, `thorough` for `garnish profile`."""
