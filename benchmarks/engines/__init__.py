"""The same node with both engines, and vLLM's own server: the same calls to each in turn. `engines` is the study."""
