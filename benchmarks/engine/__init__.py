"""The engine in process against transformers and PEFT; a decode step beside busy processes."""
