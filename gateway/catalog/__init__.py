"""Cached reads of the registry, as calls need them: who calls (`callers`) and what a name means (`functions`), kept in
memory until `name_watch` reads that it may have changed. Nothing here knows of nodes."""
