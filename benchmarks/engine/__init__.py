"""The engine in process against transformers and PEFT; a decode step next to busy processes."""
