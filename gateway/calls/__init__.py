"""A call from its checked request to its last token. It enters in `prepare` (prompt as tokens, all defaults filled
in), `dispatch` routes it and follows it over nodes, and it leaves as `reply` or, on /v1, `openai_reply`."""
