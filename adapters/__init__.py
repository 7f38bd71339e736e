"""Adapters: PEFT files in, a validated serving artifact and registry entries out.

A deploy enters at `registry.Registry.deploy`, goes through `peft_format`, `validate` and `artifact`, and leaves as
objects behind the `store.ObjectStore` protocol. Nodes read artifacts back with `artifact.read_header` and ranged gets.
"""
