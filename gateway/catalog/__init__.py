"""What the registry says, as calls need it: who calls (`callers`) and what a name means (`functions`), kept in memory
until `name_watch` reads that it may have changed. Nothing here knows of nodes."""
