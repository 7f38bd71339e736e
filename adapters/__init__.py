"""Validation and storage of adapters: PEFT files become a serving artifact and registry entries.

A deploy enters at `registry.Registry.deploy`. It passes through `peft_format`, `validate` and `artifact`, and is stored
as objects through the `store.ObjectStore` protocol. Nodes read artifacts with `artifact.read_header` and ranged gets.
"""
